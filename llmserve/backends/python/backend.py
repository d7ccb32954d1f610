"""`PythonBackend`: completes the config with the model's own `auto_complete_config`, and loads its instances."""

from __future__ import annotations

from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.backends.python.auto_complete import AutoCompleteConfig
from llmserve.backends.python.bls import Door
from llmserve.backends.python.errors import describe_failure
from llmserve.backends.python.instance import PythonInstance
from llmserve.backends.python.model_file import forget_model, import_model
from llmserve.backends.python.utils_module import make_utils_module
from llmserve.backends.versions import newest_version_file
from llmserve.errors import ModelConfigError, Unsupported
from llmserve.serving.backend import LoadContext, LoadedModel
from llmserve.serving.model_config import instance_names

DEFAULT_FILENAME = "model.py"


class PythonBackend:
    name = "python"

    def complete_config(self, config: ModelConfig, model_dir: Path) -> ModelConfig:
        config.default_model_filename = config.default_model_filename or DEFAULT_FILENAME
        path = newest_version_file(model_dir, config.default_model_filename)
        if path is None or "auto_complete_config" not in path.read_text(encoding="utf-8", errors="replace"):
            return config
        module_name = f"triton_model_{config.name}_auto_complete_{id(config):x}"
        model_class = import_model(path, module_name, make_utils_module(config.name, Door()))
        try:
            if not hasattr(model_class, "auto_complete_config"):
                return config
            completed = model_class.auto_complete_config(AutoCompleteConfig(config))
        except BaseException as error:  # border: the model's mistake, sys.exit() included, is its load error
            raise ModelConfigError(f"model '{config.name}': auto_complete_config: {describe_failure(error)}") from error
        finally:
            forget_model(module_name)
        if not isinstance(completed, AutoCompleteConfig):
            raise ModelConfigError(
                f"model '{config.name}': auto_complete_config must return the config that it was given"
            )
        return completed.config

    def load(self, context: LoadContext) -> LoadedModel:
        if context.parameter("EXECUTION_ENV_PATH"):
            raise Unsupported(
                f"model '{context.config.name}': EXECUTION_ENV_PATH is not supported: models run in the server's own "
                "Python; install what they import there and remove the parameter"
            )
        instances = [PythonInstance(name, context) for name in instance_names(context.config)]
        started = [instance.start() for instance in instances]
        failures = [str(error) for future in started if (error := future.exception()) is not None]
        if failures:
            for instance in instances:
                instance.abandon()
            raise ModelConfigError("\n".join(dict.fromkeys(failures)))
        return LoadedModel(instances)
