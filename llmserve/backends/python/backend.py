"""`PythonBackend`: completes the config with the model's own `auto_complete_config`, and loads its instances."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.backends.functions import instance_devices
from llmserve.backends.python.complete import run_auto_complete
from llmserve.backends.python.host import ModelSpec
from llmserve.backends.python.instance import Host, PythonInstance
from llmserve.backends.python.local_server import LocalServer
from llmserve.backends.python.metric_store import MetricStore
from llmserve.backends.python.parameters import PythonParameters
from llmserve.backends.python.process.complete import complete_in_process
from llmserve.backends.python.process.environment import Environment, Environments
from llmserve.backends.python.process.host import ProcessHost
from llmserve.backends.python.services import Services
from llmserve.backends.python.thread_host import ThreadHost
from llmserve.backends.versions import newest_version_file
from llmserve.errors import ModelConfigError
from llmserve.serving.backend import LoadContext, LoadedModel, substitute_directory
from llmserve.serving.config.proto_json import message_to_dict
from llmserve.wire.request_memory import RequestMemory

DEFAULT_FILENAME = "model.py"


class PythonBackend:
    name = "python"

    def __init__(self, memory: RequestMemory | None = None) -> None:
        """`memory`: of the server's requests; models count their memory in it (`memory.py`)."""
        self._memory = memory
        self.custom_metrics = MetricStore()
        self._environments = Environments()

    def complete_config(self, config: ModelConfig, model_dir: Path) -> ModelConfig:
        parameters = PythonParameters.read(config)
        config.default_model_filename = config.default_model_filename or DEFAULT_FILENAME
        path = newest_version_file(model_dir, config.default_model_filename)
        if path is None or "auto_complete_config" not in path.read_text(encoding="utf-8", errors="replace"):
            return config
        given = config.SerializeToString()
        if parameters.in_process:
            return ModelConfig.FromString(complete_in_process(path, given, self._environment(parameters, model_dir)))
        return ModelConfig.FromString(run_auto_complete(path, given))

    def load(self, context: LoadContext) -> LoadedModel:
        parameters = PythonParameters.read(context.config)
        environment = self._environment(parameters, context.model_dir)
        instances = [
            self._instance(_spec(name, context, gpu), context, parameters, environment)
            for name, gpu in instance_devices(context.config)
        ]
        started = [instance.start() for instance in instances]
        failures = [str(error) for future in started if (error := future.exception()) is not None]
        if failures:
            for instance in instances:
                instance.abandon()
            raise ModelConfigError("\n".join(dict.fromkeys(failures)))
        return LoadedModel(instances)

    def _environment(self, parameters: PythonParameters, model_dir: Path) -> Environment | None:
        if not parameters.environment:
            return None
        return self._environments.open(Path(substitute_directory(parameters.environment, model_dir)))

    def _instance(
        self, spec: ModelSpec, context: LoadContext, parameters: PythonParameters, environment: Environment | None
    ) -> PythonInstance:
        services = Services(context, self.custom_metrics)
        server = LocalServer(context.infer, services)

        def make_host(on_death: Callable[[], None]) -> Host:
            if parameters.in_process:
                return ProcessHost(spec, server, environment)
            return ThreadHost(spec, server, on_death, self._memory)

        return PythonInstance(spec, services, make_host, limits=parameters.limits)


def _spec(instance_name: str, context: LoadContext, gpu: int) -> ModelSpec:
    config = context.config
    arguments = {
        "model_config": json.dumps(message_to_dict(config)),
        "model_instance_kind": "CPU" if gpu < 0 else "GPU",
        "model_instance_device_id": str(max(gpu, 0)),
        "model_instance_name": instance_name,
        "model_repository": str(context.model_dir),
        "model_version": context.version,
        "model_name": config.name,
    }
    return ModelSpec(
        instance_name,
        config.name,
        context.version,
        context.version_dir / (config.default_model_filename or DEFAULT_FILENAME),
        decoupled=bool(config.model_transaction_policy.decoupled),
        output_names=tuple(output.name for output in config.output),
        arguments=arguments,
    )
