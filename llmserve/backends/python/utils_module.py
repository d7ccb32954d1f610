"""The module `triton_python_backend_utils`, one per instance, so that each calls other models under its own name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from llmserve.backends.python import dtypes, errors, metrics, requests, responses, tensors
from llmserve.backends.python.bls import ResponseIterator, ServerApi, ask

MODULE_NAME = "triton_python_backend_utils"
MODULE_NAMES = (MODULE_NAME, "c_python_backend_utils")  # the second is where Triton has its classes


class LogLevel(IntEnum):
    INFO, WARNING, ERROR, VERBOSE = range(4)


class Logger:
    """`pb_utils.Logger`: a model's lines in the server's log."""

    LogLevel = LogLevel
    INFO, WARNING, ERROR, VERBOSE = LogLevel
    _LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)

    def __init__(self, instance_name: str) -> None:
        self._logger = logging.getLogger(f"llmserve.model.{instance_name}")

    def log(self, message: str, level: int = INFO) -> None:
        if not isinstance(message, str) or not isinstance(level, LogLevel):
            kinds = f"{type(message).__name__} and {type(level).__name__}"
            raise TypeError(f"a log line requires a str and a level of Logger, got {kinds}")
        self._logger.log(self._LEVELS[level], "%s", message)

    def log_info(self, message: str) -> None:
        self.log(message, self.INFO)

    def log_warn(self, message: str) -> None:
        self.log(message, self.WARNING)

    def log_error(self, message: str) -> None:
        self.log(message, self.ERROR)

    def log_verbose(self, message: str) -> None:
        self.log(message, self.VERBOSE)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Read it from the config that `initialize` receives as JSON."""
    return next((tensor for tensor in model_config.get("input", ()) if tensor["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    return next((tensor for tensor in model_config.get("output", ()) if tensor["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def make_utils_module(instance_name: str, server: ServerApi, version_dir: Path | None = None) -> ModuleType:
    """`version_dir`: the folder of model.py; None for code that belongs to no model."""
    module = ModuleType(MODULE_NAME, "The module that a TritonPythonModel imports.")
    bound = {"server": server, "__module__": MODULE_NAME}
    module.__dict__.update(
        InferenceRequest=type("InferenceRequest", (requests.InferenceRequest,), bound),
        InferenceResponse=responses.InferenceResponse,
        InferenceResponseSender=responses.InferenceResponseSender,
        InferenceTrace=requests.InferenceTrace,
        Logger=Logger(instance_name),
        Metric=metrics.Metric,
        MetricFamily=type("MetricFamily", (metrics.MetricFamily,), bound),
        MetricKind=metrics.MetricFamily,
        PreferredMemory=requests.PreferredMemory,
        ResponseIterator=ResponseIterator,
        Tensor=tensors.Tensor,
        TritonError=errors.TritonError,
        TritonModelException=errors.TritonModelException,
        **_CONSTANTS,
        **_FUNCTIONS,
        **_model_control(server),
        np=np,  # published models import it from here
        get_model_dir=lambda: str(version_dir or ""),
        __getattr__=_get_late,
    )
    return module


def _get_late(name: str) -> Any:
    """Attributes that few models need and that take long to import."""
    if name != "ModelConfig":
        raise AttributeError(f"module '{MODULE_NAME}' has no attribute '{name}'")
    from llmserve.backends.python.auto_complete import AutoCompleteConfig

    return AutoCompleteConfig


_CONSTANTS = {
    "TRITONSERVER_MEMORY_CPU": requests.PreferredMemory.TRITONSERVER_MEMORY_CPU,
    "TRITONSERVER_MEMORY_GPU": requests.PreferredMemory.TRITONSERVER_MEMORY_GPU,
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END": requests.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START": requests.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    "TRITONSERVER_REQUEST_RELEASE_ALL": requests.TRITONSERVER_REQUEST_RELEASE_ALL,
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE": requests.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL": responses.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    "TRITON_STRING_TO_NUMPY": dtypes.TRITON_STRING_TO_NUMPY,
}
_FUNCTIONS = {
    function.__name__: function
    for function in (
        dtypes.deserialize_bytes_tensor,
        dtypes.numpy_to_triton_type,
        dtypes.serialize_byte_tensor,
        dtypes.triton_string_to_numpy,
        dtypes.triton_to_numpy_type,
        get_input_config_by_name,
        get_output_config_by_name,
        requests.get_input_tensor_by_name,
        responses.get_output_tensor_by_name,
        using_decoupled_model_transaction_policy,
    )
}


def _model_control(server: ServerApi) -> dict[str, Callable[..., Any]]:
    """The model loading API. While models are loaded, a model may wait for others, but must not be waited for."""

    def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
        """`files`: "file:1/model.py" -> its bytes, instead of the repository's; needs a config (JSON)."""
        ask(server, "load_model", model_name, config, dict(files or {}))

    def unload_model(model_name: str, unload_dependents: bool = False) -> None:
        ask(server, "unload_model", model_name, unload_dependents)

    def is_model_ready(model_name: str, model_version: str = "") -> bool:
        return bool(ask(server, "is_model_ready", model_name, model_version))

    return {function.__name__: function for function in (load_model, unload_model, is_model_ready)}
