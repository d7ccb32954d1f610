"""`inference.GRPCInferenceService` messages to and from the core's requests and responses."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import InvalidArgument, Unsupported
from llmserve.frontends.parameters import EMPTY_FINAL_RESPONSE, sort_parameters
from llmserve.frontends.tensors import decode_tensor, element_count, encode_tensor, object_array, shaped
from llmserve.serving.signature import datatype_name
from llmserve.serving.types import NUMPY_DTYPES, InferRequest, InferResponse, ParameterValue, Tensor

FINAL_RESPONSE = "triton_final_response"

# typed contents: field -> the datatypes that it may carry; the first is the one named in errors
CONTENTS: Mapping[str, tuple[str, ...]] = {
    "bool_contents": ("BOOL",),
    "int_contents": ("INT32", "INT8", "INT16"),
    "int64_contents": ("INT64",),
    "uint_contents": ("UINT32", "UINT8", "UINT16"),
    "uint64_contents": ("UINT64",),
    "fp32_contents": ("FP32",),
    "fp64_contents": ("FP64",),
    "bytes_contents": ("BYTES",),
}
FIELD_OF = {datatype: name for name, datatypes in CONTENTS.items() for datatype in datatypes}


def parse_request(
    message: service_pb2.ModelInferRequest, config: ModelConfig, *, deadline: float | None
) -> InferRequest:
    """The core's request. Tensors are checked for form here; the core checks them against the model's config."""
    parameters = read_parameters(message.parameters)
    parameters.pop(EMPTY_FINAL_RESPONSE, None)
    known = sort_parameters(parameters, _wrong_type)
    return InferRequest(
        model_name=message.model_name,
        model_version=message.model_version,
        request_id=message.id,
        inputs=_parse_inputs(message, config),
        requested_outputs=tuple(dict.fromkeys(_requested_output(output) for output in message.outputs)),
        parameters=known.custom,
        priority=known.priority,
        timeout_us=known.timeout_us,
        deadline=deadline,
        sequence_id=known.sequence_id,
        sequence_start=known.sequence_start,
        sequence_end=known.sequence_end,
    )


def wants_empty_final_response(message: service_pb2.ModelInferRequest) -> bool:
    if EMPTY_FINAL_RESPONSE not in message.parameters:
        return False
    parameter = message.parameters[EMPTY_FINAL_RESPONSE]
    if parameter.WhichOneof("parameter_choice") != "bool_param":
        _wrong_type(EMPTY_FINAL_RESPONSE, "bool_param")
    return bool(parameter.bool_param)


def deadline_after(seconds: float | None) -> float | None:
    """`time.monotonic()` at which a call with this much time left is over."""
    return None if seconds is None else time.monotonic() + seconds


def read_parameters(parameters: Mapping[str, service_pb2.InferParameter]) -> dict[str, ParameterValue]:
    """Plain values of an `InferParameter` map; a parameter without a value is an error."""
    values: dict[str, ParameterValue] = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidArgument(f"parameter '{name}' has no value")
        values[name] = getattr(parameter, choice)
    return values


def _wrong_type(name: str, expected: str) -> NoReturn:
    raise InvalidArgument(f"invalid value type for '{name}' parameter, expected {expected}.")


def _requested_output(output: service_pb2.ModelInferRequest.InferRequestedOutputTensor) -> str:
    for feature in ("classification", "shared_memory_region"):
        if feature in output.parameters:
            raise Unsupported(f"output '{output.name}' asks for '{feature}', which this server does not offer")
    return str(output.name)


def _parse_inputs(message: service_pb2.ModelInferRequest, config: ModelConfig) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    for index, tensor in enumerate(message.inputs):
        if tensor.name in inputs:
            raise InvalidArgument(f"input '{tensor.name}' already exists in request")
        if "shared_memory_region" in tensor.parameters:
            raise Unsupported(f"input '{tensor.name}' is in shared memory, which this server does not offer")
        if tensor.datatype not in NUMPY_DTYPES:
            _unknown_datatype(tensor.name, message.model_name, config)
        inputs[tensor.name] = _parse_input(message, index)
    return inputs


def _unknown_datatype(name: str, model: str, config: ModelConfig) -> NoReturn:
    expected = next((datatype_name(entry.data_type) for entry in config.input if entry.name == name), "another one")
    raise InvalidArgument(
        f"inference input '{name}' data-type is '<invalid>', but model '{model}' expects '{expected}'"
    )


def _parse_input(message: service_pb2.ModelInferRequest, index: int) -> Tensor:
    tensor, model = message.inputs[index], message.model_name
    if message.raw_input_contents:
        if tensor.HasField("contents"):
            raise InvalidArgument(
                f"contents field must not be specified when using raw_input_contents for '{tensor.name}' "
                f"for model '{model}'"
            )
        if index >= len(message.raw_input_contents):
            _no_data(tensor.name, model)
        raw = message.raw_input_contents[index]
        return decode_tensor(tensor.name, tensor.datatype, tensor.shape, raw, model=model)
    return _parse_typed_contents(tensor, model)


def _no_data(name: str, model: str) -> NoReturn:
    raise InvalidArgument(f"unable to find data for input tensor '{name}' for model '{model}' in request.")


def _parse_typed_contents(tensor: service_pb2.ModelInferRequest.InferInputTensor, model: str) -> Tensor:
    count = element_count(tensor.name, tensor.shape, model=model)
    filled = [name for name in CONTENTS if len(getattr(tensor.contents, name))]
    if not filled:
        if count:
            _no_data(tensor.name, model)
        return decode_tensor(tensor.name, tensor.datatype, tensor.shape, b"", model=model)
    expected = FIELD_OF.get(tensor.datatype)
    wrong = [name for name in filled if name != expected]
    if wrong:
        raise InvalidArgument(
            f"unexpected explicit tensor data for input tensor '{tensor.name}' for model '{model}' of type "
            f"'{CONTENTS[wrong[0]][0]}', expected datatype '{tensor.datatype}'"
        )
    values = getattr(tensor.contents, filled[0])
    if len(values) != count:
        raise InvalidArgument(
            f"input byte size mismatch for input '{tensor.name}' for model '{model}'. "
            f"Expected {count} elements, got {len(values)}"
        )
    return shaped(tensor.name, tensor.datatype, _typed_array(tensor, values, model=model), tensor.shape)


def _typed_array(
    tensor: service_pb2.ModelInferRequest.InferInputTensor, values: Iterable[Any], *, model: str
) -> NDArray[Any]:
    if tensor.datatype == "BYTES":
        return object_array(list(values))
    try:
        return np.array(list(values), dtype=NUMPY_DTYPES[tensor.datatype])
    except OverflowError as error:  # int_contents carries INT8 and INT16 too
        raise InvalidArgument(
            f"a value of input '{tensor.name}' for model '{model}' does not fit into {tensor.datatype}: {error}"
        ) from error


def response_message(response: InferResponse) -> service_pb2.ModelInferResponse:
    """A response with outputs; the tensors travel as raw bytes."""
    message = service_pb2.ModelInferResponse(
        model_name=response.model_name, model_version=response.model_version, id=response.request_id
    )
    for tensor in response.outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_output_contents.append(encode_tensor(tensor))
    write_parameters(message.parameters, response.parameters)
    return message


def write_parameters(target: Any, values: Mapping[str, ParameterValue]) -> None:
    """Store plain values in an `InferParameter` map."""
    for name, value in values.items():
        if isinstance(value, bool):
            target[name].bool_param = value
        elif isinstance(value, int):
            _write_integer(target[name], value)
        elif isinstance(value, float):
            target[name].double_param = value
        else:
            target[name].string_param = value


def _write_integer(parameter: service_pb2.InferParameter, value: int) -> None:
    if -(2**63) <= value < 2**63:
        parameter.int64_param = value
    elif 0 <= value < 2**64:
        parameter.uint64_param = value
    else:
        parameter.double_param = float(value)


def stream_message(response: InferResponse, *, decoupled: bool) -> service_pb2.ModelStreamInferResponse:
    """One message of `ModelStreamInfer` for one response of the core, an error included."""
    if response.error is not None:
        message = service_pb2.ModelStreamInferResponse(
            error_message=str(response.error),
            infer_response=service_pb2.ModelInferResponse(id=response.request_id, model_name=response.model_name),
        )
    else:
        message = service_pb2.ModelStreamInferResponse(infer_response=response_message(response))
    final = response.final or (not decoupled and response.error is None)
    message.infer_response.parameters[FINAL_RESPONSE].bool_param = final
    return message


def empty_final_message(response: InferResponse) -> service_pb2.ModelStreamInferResponse:
    """The end of a decoupled request, when its last data response did not say so: no version, no outputs."""
    inner = service_pb2.ModelInferResponse(model_name=response.model_name, id=response.request_id)
    inner.parameters[FINAL_RESPONSE].bool_param = True
    return service_pb2.ModelStreamInferResponse(infer_response=inner)


def early_error_message(request_id: str, error: BaseException) -> service_pb2.ModelStreamInferResponse:
    """A request that failed before a model answered: only its id is known."""
    return service_pb2.ModelStreamInferResponse(
        error_message=str(error), infer_response=service_pb2.ModelInferResponse(id=request_id)
    )
