"""Converts `inference.GRPCInferenceService` messages to the core's requests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import InvalidArgument
from llmserve.frontends.grpc.large_messages import LargeInput, LargeRequest
from llmserve.frontends.shared.data_source import DataSource
from llmserve.frontends.shared.delivery import PLAIN, Delivery
from llmserve.frontends.shared.raw_tensors import (
    Raw,
    WrongSize,
    decode_tensor,
    element_count,
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
from llmserve.serving.signature import datatype_advice, datatype_name, id_label
from llmserve.serving.types import NUMPY_DTYPES, InferRequest, ParameterValue, Tensor

ModelInferRequest: TypeAlias = service_pb2.ModelInferRequest | LargeRequest
InferInputTensor: TypeAlias = service_pb2.ModelInferRequest.InferInputTensor | LargeInput

ONLY_EMPTY_FINAL = f"Only the following keys starting with 'triton_' are allowed: {EMPTY_FINAL_RESPONSE}"

# typed contents: field -> the datatypes that it may have; errors name the first
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
    message: ModelInferRequest, config: ModelConfig, source: DataSource, *, deadline: float | None
) -> tuple[InferRequest, Delivery]:
    """The core's request, and the delivery of outputs that the client requests.

    This function checks the form of tensors; the core checks them against the model's config.
    """
    parameters = read_parameters(message.parameters)
    parameters.pop(EMPTY_FINAL_RESPONSE, None)
    known = sort_parameters(parameters, _wrong_type, ONLY_EMPTY_FINAL)
    request = InferRequest(
        model_name=message.model_name,
        model_version=message.model_version,
        request_id=message.id,
        inputs=_parse_inputs(message, config, source),
        requested_outputs=tuple(dict.fromkeys(output.name for output in message.outputs)),
        parameters=known.custom,
        priority=known.priority,
        timeout_us=known.timeout_us,
        deadline=deadline,
        sequence_id=known.sequence_id,
        sequence_start=known.sequence_start,
        sequence_end=known.sequence_end,
    )
    return request, _parse_delivery(message, source.memory)


def wants_empty_final_response(message: ModelInferRequest) -> bool:
    if EMPTY_FINAL_RESPONSE not in message.parameters:
        return False
    parameter = message.parameters[EMPTY_FINAL_RESPONSE]
    if parameter.WhichOneof("parameter_choice") != "bool_param":
        _wrong_type(EMPTY_FINAL_RESPONSE, "bool_param")
    return bool(parameter.bool_param)


def deadline_after(seconds: float | None) -> float | None:
    """The `time.monotonic()` at which a call ends that has this much time left."""
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


def _parse_delivery(message: ModelInferRequest, memory: SharedMemory) -> Delivery:
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
    tensor: InferInputTensor | service_pb2.ModelInferRequest.InferRequestedOutputTensor,
) -> Place:
    """The place of a tensor in shared memory."""

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


def _parse_inputs(message: ModelInferRequest, config: ModelConfig, source: DataSource) -> dict[str, Tensor]:
    """The inputs by name. Raw contents are in the order of the inputs that are not in shared memory."""
    try:
        return _read_inputs(message, config, source)
    except WrongSize as error:
        raise InvalidArgument(id_label(message.id) + str(error)) from error


def _read_inputs(message: ModelInferRequest, config: ModelConfig, source: DataSource) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    raw_contents = iter(message.raw_input_contents)
    for tensor in message.inputs:
        if tensor.name in inputs:
            raise InvalidArgument(f"{id_label(message.id)}input '{tensor.name}' already exists in request")
        if tensor.datatype not in NUMPY_DTYPES:
            _unknown_datatype(message, tensor, config)
        if tensor.parameters and REGION in tensor.parameters:
            inputs[tensor.name] = _shared_input(tensor, message.model_name, source)
        elif message.raw_input_contents:
            inputs[tensor.name] = _raw_input(tensor, message.model_name, raw_contents, source)
        else:
            inputs[tensor.name] = _parse_typed_contents(tensor, message.model_name, source)
    return inputs


def _shared_input(tensor: InferInputTensor, model: str, source: DataSource) -> Tensor:
    if tensor.HasField("contents"):
        raise InvalidArgument(
            f"unexpected 'content' provided when using shared memory for input tensor '{tensor.name}' "
            f"for model '{model}'"
        )
    raw = source.read(_place(tensor))
    return decode_tensor(tensor.name, tensor.datatype, tensor.shape, raw, model=model, source=source)


def _unknown_datatype(message: ModelInferRequest, tensor: InferInputTensor, config: ModelConfig) -> NoReturn:
    name = tensor.name
    expected = next((datatype_name(entry.data_type) for entry in config.input if entry.name == name), "another one")
    raise InvalidArgument(
        f"{id_label(message.id)}inference input '{name}' data-type is '<invalid>', but model '{message.model_name}' "
        f"expects '{expected}'{datatype_advice(tensor.datatype)}"
    )


def _raw_input(tensor: InferInputTensor, model: str, raw_contents: Iterator[Raw], source: DataSource) -> Tensor:
    if tensor.HasField("contents"):
        raise InvalidArgument(
            f"contents field must not be specified when using raw_input_contents for '{tensor.name}' "
            f"for model '{model}'"
        )
    raw = next(raw_contents, None)
    if raw is None:
        _no_data(tensor.name, model)
    return decode_tensor(tensor.name, tensor.datatype, tensor.shape, raw, model=model, source=source)


def _no_data(name: str, model: str) -> NoReturn:
    raise InvalidArgument(f"unable to find data for input tensor '{name}' for model '{model}' in request.")


def _parse_typed_contents(tensor: InferInputTensor, model: str, source: DataSource) -> Tensor:
    count = element_count(tensor.name, tensor.shape, model=model)
    filled = [name for name in CONTENTS if len(getattr(tensor.contents, name))]
    if not filled:
        if count:
            _no_data(tensor.name, model)
        return decode_tensor(tensor.name, tensor.datatype, tensor.shape, b"", model=model, source=source)
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
    if tensor.datatype == "BYTES":
        source.expect_texts(tensor.name, count)
    return shaped(tensor.name, tensor.datatype, _typed_array(tensor, values, model=model), tensor.shape)


def _typed_array(tensor: InferInputTensor, values: Iterable[Any], *, model: str) -> NDArray[Any]:
    if tensor.datatype == "BYTES":
        return object_array(list(values))
    if isinstance(values, np.ndarray):
        return _narrowed(tensor, values, model=model)
    try:
        return np.array(list(values), dtype=NUMPY_DTYPES[tensor.datatype])
    except OverflowError as error:  # int_contents also carries INT8 and INT16
        _does_not_fit(tensor, model, str(error))


def _narrowed(tensor: InferInputTensor, values: NDArray[Any], *, model: str) -> NDArray[Any]:
    dtype = NUMPY_DTYPES[tensor.datatype]
    if dtype.itemsize < values.itemsize:
        limits = np.iinfo(dtype)
        for bound in (values.min(initial=0), values.max(initial=0)):
            if not limits.min <= bound <= limits.max:
                _does_not_fit(tensor, model, f"Python integer {bound} out of bounds for {dtype}")
    return values.astype(dtype, copy=False)


def _does_not_fit(tensor: InferInputTensor, model: str, problem: str) -> NoReturn:
    raise InvalidArgument(
        f"a value of input '{tensor.name}' for model '{model}' is out of range for {tensor.datatype}: {problem}"
    )
