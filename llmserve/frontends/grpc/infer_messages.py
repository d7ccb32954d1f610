"""`inference.GRPCInferenceService` messages to and from the core's requests and responses."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import InvalidArgument
from llmserve.frontends.shared.delivery import PLAIN, Delivery
from llmserve.frontends.shared.raw_tensors import (
    WrongSize,
    decode_tensor,
    element_count,
    encode_tensor,
    object_array,
    shaped,
)
from llmserve.frontends.shared.request_parameters import (
    BYTE_SIZE,
    CLASSES,
    EMPTY_FINAL_RESPONSE,
    OFFSET,
    REGION,
    sort_parameters,
)
from llmserve.frontends.shared.shared_memory import Place, SharedMemory
from llmserve.serving.signature import datatype_name, id_label
from llmserve.serving.types import NUMPY_DTYPES, InferRequest, InferResponse, ParameterValue, Tensor

FINAL_RESPONSE = "triton_final_response"
ONLY_EMPTY_FINAL = f"Only the following keys starting with 'triton_' are allowed: {EMPTY_FINAL_RESPONSE}"

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
    message: service_pb2.ModelInferRequest, config: ModelConfig, memory: SharedMemory, *, deadline: float | None
) -> tuple[InferRequest, Delivery]:
    """The core's request, and how the client wants its outputs.

    Tensors are checked for form here; the core checks them against the model's config.
    """
    parameters = read_parameters(message.parameters)
    parameters.pop(EMPTY_FINAL_RESPONSE, None)
    known = sort_parameters(parameters, _wrong_type, ONLY_EMPTY_FINAL)
    request = InferRequest(
        model_name=message.model_name,
        model_version=message.model_version,
        request_id=message.id,
        inputs=_parse_inputs(message, config, memory),
        requested_outputs=tuple(dict.fromkeys(output.name for output in message.outputs)),
        parameters=known.custom,
        priority=known.priority,
        timeout_us=known.timeout_us,
        deadline=deadline,
        sequence_id=known.sequence_id,
        sequence_start=known.sequence_start,
        sequence_end=known.sequence_end,
    )
    return request, _parse_delivery(message, memory)


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
            _wrong_type(name, "int64_param, bool_param, or string_param")
        values[name] = getattr(parameter, choice)
    return values


def _wrong_type(name: str, expected: str, where: str = "") -> NoReturn:
    raise InvalidArgument(f"invalid value type for '{name}' parameter{where}, expected {expected}.")


def _parse_delivery(message: service_pb2.ModelInferRequest, memory: SharedMemory) -> Delivery:
    num_classes: dict[str, int] = {}
    places: dict[str, Place] = {}
    for output in message.outputs:
        if not output.parameters:
            continue
        if CLASSES in output.parameters:
            if REGION in output.parameters:
                raise InvalidArgument(f"output can't set both '{REGION}' and '{CLASSES}'")
            num_classes[output.name] = _num_classes(output.parameters[CLASSES])
        if REGION in output.parameters:
            places[output.name] = _place(output)
    if not num_classes and not places:
        return PLAIN
    delivery = Delivery(num_classes, places)
    delivery.check(memory)
    return delivery


def _num_classes(parameter: service_pb2.InferParameter) -> int:
    if parameter.WhichOneof("parameter_choice") != "int64_param":
        _wrong_type(CLASSES, "int64_param")
    if parameter.int64_param < 0:
        raise InvalidArgument(f"invalid value for '{CLASSES}' parameter, expected >= 0")
    return int(parameter.int64_param)


def _place(
    tensor: service_pb2.ModelInferRequest.InferInputTensor | service_pb2.ModelInferRequest.InferRequestedOutputTensor,
) -> Place:
    """Where in shared memory a tensor is, or goes."""

    def read(name: str, field: str) -> Any:
        parameter = tensor.parameters[name]
        if parameter.WhichOneof("parameter_choice") != field:
            _wrong_type(name, field, f" for tensor '{tensor.name}'")
        return getattr(parameter, field)

    region = read(REGION, "string_param")
    if BYTE_SIZE not in tensor.parameters:
        raise InvalidArgument(
            f"'{BYTE_SIZE}' must be specified along with '{REGION}' parameter for tensor '{tensor.name}'"
        )
    offset = read(OFFSET, "int64_param") if OFFSET in tensor.parameters else 0
    return Place(region, read(BYTE_SIZE, "int64_param"), offset)


def _parse_inputs(
    message: service_pb2.ModelInferRequest, config: ModelConfig, memory: SharedMemory
) -> dict[str, Tensor]:
    """Raw contents are in the order of the inputs that are not in shared memory."""
    try:
        return _read_inputs(message, config, memory)
    except WrongSize as error:
        raise InvalidArgument(id_label(message.id) + str(error)) from error


def _read_inputs(
    message: service_pb2.ModelInferRequest, config: ModelConfig, memory: SharedMemory
) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    raw_contents = iter(message.raw_input_contents)
    for tensor in message.inputs:
        if tensor.name in inputs:
            raise InvalidArgument(f"{id_label(message.id)}input '{tensor.name}' already exists in request")
        if tensor.datatype not in NUMPY_DTYPES:
            _unknown_datatype(message, tensor.name, config)
        if tensor.parameters and REGION in tensor.parameters:
            inputs[tensor.name] = _shared_input(tensor, message.model_name, memory)
        elif message.raw_input_contents:
            inputs[tensor.name] = _raw_input(tensor, message.model_name, raw_contents)
        else:
            inputs[tensor.name] = _parse_typed_contents(tensor, message.model_name)
    return inputs


def _shared_input(tensor: service_pb2.ModelInferRequest.InferInputTensor, model: str, memory: SharedMemory) -> Tensor:
    if tensor.HasField("contents"):
        raise InvalidArgument(
            f"unexpected 'content' provided when using shared memory for input tensor '{tensor.name}' "
            f"for model '{model}'"
        )
    return decode_tensor(tensor.name, tensor.datatype, tensor.shape, memory.read(_place(tensor)), model=model)


def _unknown_datatype(message: service_pb2.ModelInferRequest, name: str, config: ModelConfig) -> NoReturn:
    expected = next((datatype_name(entry.data_type) for entry in config.input if entry.name == name), "another one")
    raise InvalidArgument(
        f"{id_label(message.id)}inference input '{name}' data-type is '<invalid>', but model '{message.model_name}' "
        f"expects '{expected}'"
    )


def _raw_input(
    tensor: service_pb2.ModelInferRequest.InferInputTensor, model: str, raw_contents: Iterator[bytes]
) -> Tensor:
    if tensor.HasField("contents"):
        raise InvalidArgument(
            f"contents field must not be specified when using raw_input_contents for '{tensor.name}' "
            f"for model '{model}'"
        )
    raw = next(raw_contents, None)
    if raw is None:
        _no_data(tensor.name, model)
    return decode_tensor(tensor.name, tensor.datatype, tensor.shape, raw, model=model)


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
        size = 1 if tensor.datatype == "BYTES" else NUMPY_DTYPES[tensor.datatype].itemsize
        unit = " elements" if tensor.datatype == "BYTES" else ""
        raise WrongSize(
            f"input byte size mismatch for input '{tensor.name}' for model '{model}'. "
            f"Expected {count * size}{unit}, got {len(values) * size}{unit}"
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


def write_response(
    message: service_pb2.ModelInferResponse, response: InferResponse, *, elsewhere: Container[str] = ()
) -> None:
    """A response with outputs; the tensors travel as raw bytes, but for those that are `elsewhere`."""
    message.model_name = response.model_name
    message.model_version = response.model_version
    message.id = response.request_id
    for tensor in response.outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_output_contents.append(b"" if tensor.name in elsewhere else encode_tensor(tensor))
    write_parameters(message.parameters, response.parameters)


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


def stream_message(
    response: InferResponse, *, decoupled: bool, elsewhere: Container[str] = ()
) -> service_pb2.ModelStreamInferResponse:
    """One message of `ModelStreamInfer` for one response of the core, an error included."""
    message = service_pb2.ModelStreamInferResponse()
    if response.error is not None:
        message.error_message = str(response.error)
        message.infer_response.id = response.request_id
        message.infer_response.model_name = response.model_name
    else:
        write_response(message.infer_response, response, elsewhere=elsewhere)
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
