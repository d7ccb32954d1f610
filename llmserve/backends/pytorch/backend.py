"""`PyTorchBackend`: opens a model file once per instance, or once for all instances that can share it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.backends.functions import FunctionInstance, instance_devices, needs_package
from llmserve.backends.pytorch.parameters import TorchParameters
from llmserve.backends.versions import newest_version_file
from llmserve.errors import ModelConfigError
from llmserve.serving.backend import LoadContext, LoadedModel

PLATFORM = "pytorch_libtorch"
DEFAULT_FILENAMES = ("model.pt", "model.pt2")  # TorchScript, exported program


class PyTorchBackend:
    name = "pytorch"

    def complete_config(self, config: ModelConfig, model_dir: Path) -> ModelConfig:
        config.platform = config.platform or PLATFORM
        candidates = (config.default_model_filename, *DEFAULT_FILENAMES)
        found = (name for name in candidates if name and newest_version_file(model_dir, name) is not None)
        config.default_model_filename = next(found, candidates[0] or DEFAULT_FILENAMES[0])
        return config

    def load(self, context: LoadContext) -> LoadedModel:
        config = context.config
        path = context.version_dir / (config.default_model_filename or DEFAULT_FILENAMES[0])
        if not path.is_file():
            raise ModelConfigError(f"{path} does not exist")
        parameters = TorchParameters.read(config)
        with needs_package(config, "torch", extra="pytorch"):
            from llmserve.backends.pytorch.torch_model import TorchFunction, open_module, set_inter_op_threads

        set_inter_op_threads(parameters.inter_op_threads)
        opened = cache(open_module) if parameters.shares_weights else open_module
        devices = instance_devices(config)
        functions = [TorchFunction(opened(path, gpu), config, parameters) for _, gpu in devices]
        instances = [
            FunctionInstance(name, context, function) for (name, _), function in zip(devices, functions, strict=True)
        ]
        return LoadedModel(instances, collates=True)
