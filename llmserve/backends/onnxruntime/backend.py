"""`OnnxRuntimeBackend`: completes the config from the model's own tensors, and loads one session per instance."""

from __future__ import annotations

from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.backends.functions import FunctionInstance, instance_devices, needs_package
from llmserve.backends.onnxruntime.config import complete_tensors, mismatches
from llmserve.backends.versions import newest_version_file
from llmserve.errors import ModelConfigError, raise_problems
from llmserve.serving.backend import LoadContext, LoadedModel

PLATFORM = "onnxruntime_onnx"
DEFAULT_FILENAME = "model.onnx"
DEFAULT_MAX_BATCH_SIZE = 4


class OnnxRuntimeBackend:
    name = "onnxruntime"

    def __init__(self, default_max_batch_size: int = DEFAULT_MAX_BATCH_SIZE) -> None:
        """`default_max_batch_size`: for models that can batch and whose config does not set it."""
        self._default_max_batch_size = default_max_batch_size

    def complete_config(self, config: ModelConfig, model_dir: Path) -> ModelConfig:
        config.platform = config.platform or PLATFORM
        config.default_model_filename = config.default_model_filename or DEFAULT_FILENAME
        path = newest_version_file(model_dir, config.default_model_filename)
        if path is not None and not (config.input and config.output):
            with needs_package(config, "onnxruntime", extra="onnx"):
                from llmserve.backends.onnxruntime.session import read_tensors

            inputs, outputs = read_tensors(path)
            complete_tensors(config, inputs, outputs, self._default_max_batch_size)
        return config

    def load(self, context: LoadContext) -> LoadedModel:
        config = context.config
        path = context.version_dir / (config.default_model_filename or DEFAULT_FILENAME)
        if not path.exists():
            raise ModelConfigError(f"{path} does not exist")
        with needs_package(config, "onnxruntime", extra="onnx"):
            from llmserve.backends.onnxruntime.session import OnnxFunction

        devices = instance_devices(config)
        functions = [OnnxFunction(path, config, gpu) for _, gpu in devices]
        problems = mismatches(config, functions[0].inputs, functions[0].outputs)
        raise_problems(ModelConfigError, f"model '{config.name}': its config does not fit {path}", problems)
        instances = [
            FunctionInstance(name, context, function) for (name, _), function in zip(devices, functions, strict=True)
        ]
        return LoadedModel(instances, collates=True)
