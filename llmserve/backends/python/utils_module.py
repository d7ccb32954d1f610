"""The module `triton_python_backend_utils`, one per instance, so that each knows its own door to other models."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from llmserve.backends.python import errors, requests, responses, tensors
from llmserve.backends.python.auto_complete import AutoCompleteConfig
from llmserve.backends.python.bls import Door

MODULE_NAME = "triton_python_backend_utils"


class Logger:
    """`pb_utils.Logger`: a model's own lines in the server's log."""

    INFO, WARNING, ERROR, VERBOSE = range(4)
    _LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)

    def __init__(self, instance_name: str) -> None:
        self._logger = logging.getLogger(f"llmserve.model.{instance_name}")

    def log(self, message: str, level: int = INFO) -> None:
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
    """From the config that `initialize` gets as JSON."""
    return next((tensor for tensor in model_config.get("input", ()) if tensor["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    return next((tensor for tensor in model_config.get("output", ()) if tensor["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def make_utils_module(instance_name: str, door: Door) -> ModuleType:
    module = ModuleType(MODULE_NAME, "What a TritonPythonModel imports.")
    bound_request = type("InferenceRequest", (requests.InferenceRequest,), {"door": door, "__module__": MODULE_NAME})
    module.__dict__.update(
        Tensor=tensors.Tensor,
        InferenceRequest=bound_request,
        InferenceResponse=responses.InferenceResponse,
        InferenceResponseSender=responses.InferenceResponseSender,
        TritonError=errors.TritonError,
        TritonModelException=errors.TritonModelException,
        ModelConfig=AutoCompleteConfig,
        Logger=Logger(instance_name),
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=responses.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        TRITONSERVER_REQUEST_FLAG_SEQUENCE_START=requests.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
        TRITONSERVER_REQUEST_FLAG_SEQUENCE_END=requests.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
        get_input_tensor_by_name=requests.get_input_tensor_by_name,
        get_output_tensor_by_name=responses.get_output_tensor_by_name,
        get_input_config_by_name=get_input_config_by_name,
        get_output_config_by_name=get_output_config_by_name,
        triton_string_to_numpy=tensors.triton_string_to_numpy,
        using_decoupled_model_transaction_policy=using_decoupled_model_transaction_policy,
    )
    return module
