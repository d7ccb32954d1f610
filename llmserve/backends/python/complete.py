"""Runs a model's `auto_complete_config`, in this process or in a separate one."""

from __future__ import annotations

from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.backends.python.auto_complete import AutoCompleteConfig
from llmserve.backends.python.bls import NoServer
from llmserve.backends.python.errors import describe_failure
from llmserve.backends.python.model_file import forget_model, import_model
from llmserve.backends.python.utils_module import make_utils_module
from llmserve.errors import ModelConfigError


def run_auto_complete(file: Path, config: bytes) -> bytes:
    """Complete a serialized config with the model's `auto_complete_config`, if it has one.

    Raises `ModelConfigError`; any failure of the model, including sys.exit(), is its load error.
    """
    given = ModelConfig.FromString(config)
    module_name = f"triton_model_{given.name}_auto_complete_{id(given):x}"
    model_class = import_model(file, module_name, make_utils_module(given.name, NoServer(), file.parent))
    try:
        if not hasattr(model_class, "auto_complete_config"):
            return config
        completed = model_class.auto_complete_config(AutoCompleteConfig(given))
    except BaseException as error:  # border: an error of the model
        raise ModelConfigError(f"model '{given.name}': auto_complete_config: {describe_failure(error)}") from error
    finally:
        forget_model(module_name)
    if not isinstance(completed, AutoCompleteConfig):
        raise ModelConfigError(f"model '{given.name}': auto_complete_config must return the config that it was given")
    data: bytes = completed.config.SerializeToString()
    return data
