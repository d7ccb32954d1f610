"""Converts bodies of `POST .../infer` (JSON, or JSON followed by binary tensors) to the core's requests.

With `Inference-Header-Content-Length: n` the first n bytes are JSON and the rest is the binary tensors, in input order.
n = 0 is a "raw" request: the whole body is the model's one input, and the outputs are binary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NoReturn

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInput

from llmserve.errors import InternalError, InvalidArgument
from llmserve.frontends.http.infer_outputs import ALL_BINARY, BINARY_ONLY, OutputForm, parse_outputs, parse_place
from llmserve.frontends.http.json_fields import (
    Json,
    as_array,
    as_bool,
    as_object,
    as_string,
    as_unsigned,
    flatten,
    parameter_value,
    parse_json,
    required,
    tensor_values,
    unparsable,
    wrong_type,
)
from llmserve.frontends.http.numbers import Numbers
from llmserve.frontends.shared.data_source import DataSource
from llmserve.frontends.shared.raw_tensors import (
    MAX_RANK,
    Raw,
    WrongSize,
    decode_tensor,
    element_count,
    object_array,
    refuse_rank,
    shaped,
)
from llmserve.frontends.shared.request_parameters import NO_PARAMETERS, REGION, RequestParameters, sort_parameters
from llmserve.serving.signature import datatype_advice, datatype_name, id_label
from llmserve.serving.types import NUMPY_DTYPES, InferRequest, ParameterValue, Tensor
from llmserve.wire.pieces import copied

HEADER_LENGTH = "Inference-Header-Content-Length"
HEADER_LENGTH_NAME = HEADER_LENGTH.lower().encode()  # its spelling in a `Request`
DATA_SOURCES = "'data', 'binary_data_size' in 'parameters', 'shared_memory_region' in 'parameters'"


class BinarySection:
    """The bytes after the JSON header, taken tensor by tensor."""

    def __init__(self, data: Raw, model: str) -> None:
        self._data = data
        self._offset = 0
        self.model = model

    def take(self, name: str, size: int) -> Raw:
        available = len(self._data) - self._offset
        if size > available:
            raise InvalidArgument(
                f"unexpected size for input '{name}', expecting {size - available} additional bytes "
                f"for model '{self.model}'"
            )
        self._offset += size
        return self._data[self._offset - size : self._offset]

    def check_empty(self) -> None:
        if self._offset != len(self._data):
            raise InvalidArgument(f"unexpected additional input data for model '{self.model}'")


def json_length(header: str | None, body_length: int) -> int:
    """The length of the JSON; 0 means that there is none."""
    if header is None:
        return body_length
    digits = header.strip()
    sign, digits = (-1, digits[1:]) if digits.startswith("-") else (1, digits)
    length = sign * int(digits[:18]) if digits.isascii() and digits.isdigit() else 0
    if not 0 <= length <= body_length:
        raise InvalidArgument(f"inference header size should be in range (0, {body_length}), got: {length}")
    return length


def parse_infer(
    body: Raw, header: str | None, config: ModelConfig, source: DataSource, *, version: str
) -> tuple[InferRequest, OutputForm]:
    """The core's request, and the form of its outputs."""
    model = config.name
    length = json_length(header, len(body))
    if length == 0:
        return _raw_request(body, config, model=model, version=version), ALL_BINARY
    parsed = parse_json(body[:length], source.share)
    document: Mapping[str, Json] = parsed if isinstance(parsed, dict) else {}
    request_id = as_string(document.get("id", ""), "id")
    inputs = _parse_inputs(document, BinarySection(body[length:], model), source, request_id=request_id)
    parameters = _parameters(document)
    binary = as_bool(parameters.pop("binary_data_output", False), "binary_data_output")
    names, form = parse_outputs(document, source.memory, binary=binary)
    request = infer_request(
        (model, version),
        inputs,
        sort_http_parameters(parameters),
        request_id=request_id,
        requested_outputs=names,
    )
    return request, form


def infer_request(
    model_and_version: tuple[str, str],
    inputs: Mapping[str, Tensor],
    known: RequestParameters,
    *,
    request_id: str = "",
    requested_outputs: tuple[str, ...] = (),
) -> InferRequest:
    model, version = model_and_version
    return InferRequest(
        model_name=model,
        model_version=version,
        request_id=request_id,
        inputs=inputs,
        requested_outputs=requested_outputs,
        parameters=known.custom,
        priority=known.priority,
        timeout_us=known.timeout_us,
        sequence_id=known.sequence_id,
        sequence_start=known.sequence_start,
        sequence_end=known.sequence_end,
    )


def sort_http_parameters(parameters: Mapping[str, Json]) -> RequestParameters:
    if not parameters:
        return NO_PARAMETERS
    values: dict[str, ParameterValue] = {name: parameter_value(name, value) for name, value in parameters.items()}
    return sort_parameters(values, _wrong_parameter_type)


def _parameters(document: Mapping[str, Json]) -> dict[str, Json]:
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InternalError("failed to get request params.: attempt to get members for non-object")
    return dict(parameters)


def _wrong_parameter_type(name: str, expected: str) -> NoReturn:
    if name == "sequence_id":
        wrong_type(name, "string")
    wrong_type(name, "boolean" if expected == "bool_param" else "unsigned-integer")


def _parse_inputs(
    document: Mapping[str, Json], section: BinarySection, source: DataSource, *, request_id: str
) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    for entry in as_array(required(document, "inputs"), "inputs"):
        if not isinstance(entry, dict):
            _refuse_sources({}, {})
        try:
            tensor = _parse_input(entry, section, source)
        except WrongSize as error:
            raise InvalidArgument(id_label(request_id) + str(error)) from error
        if tensor.name in inputs:
            raise InvalidArgument(f"{id_label(request_id)}input '{tensor.name}' already exists in request")
        inputs[tensor.name] = tensor
    section.check_empty()
    return inputs


def _parse_input(entry: Mapping[str, Json], section: BinarySection, source: DataSource) -> Tensor:
    model = section.model
    name = as_string(required(entry, "name"), "name")
    dims = required(entry, "shape")
    if isinstance(dims, Numbers) and len(dims) > MAX_RANK:
        refuse_rank(name, len(dims), model=model)
    shape = [as_unsigned(dim, "shape") for dim in as_array(dims, "shape")]
    datatype = as_string(required(entry, "datatype"), "datatype")
    if datatype not in NUMPY_DTYPES:
        raise InvalidArgument(f"invalid datatype for input {name}{datatype_advice(datatype)}")
    raw = _binary_data(name, entry, section, source)
    if raw is not None:
        return decode_tensor(name, datatype, shape, raw, model=model, source=source)
    if datatype in BINARY_ONLY:
        raise InvalidArgument(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
        )
    leaves = flatten(entry["data"])
    if len(leaves) != element_count(name, shape, model=model):
        unparsable("data", "Shape does not match true shape of 'data' field")
    if datatype == "BYTES":
        source.expect_texts(name, len(leaves))
    return shaped(name, datatype, tensor_values(leaves, datatype), shape)


def _binary_data(name: str, entry: Mapping[str, Json], section: BinarySection, source: DataSource) -> Raw | None:
    """An input's bytes, from after the JSON or from shared memory; None if its data is in the JSON."""
    parameters = as_object(entry.get("parameters", {}), "parameters")
    if ("data" in entry) + ("binary_data_size" in parameters) + (REGION in parameters) != 1:
        _refuse_sources(entry, parameters)
    if REGION in parameters:
        return source.read(parse_place(parameters))
    if "binary_data_size" in parameters:
        return section.take(name, as_unsigned(parameters["binary_data_size"], "binary_data_size"))
    return None


def _refuse_sources(entry: Mapping[str, Json], parameters: Mapping[str, Json]) -> NoReturn:
    sources = ["'data'"] if "data" in entry else []
    sources += [f"'{key}'" for key in ("binary_data_size", REGION) if key in parameters]
    found = "set " + " ".join(sources) if sources else "no field is set"
    raise InvalidArgument(f"Input must set only one of the following fields: {DATA_SOURCES}. But {found}")


def _raw_request(body: Raw, config: ModelConfig, *, model: str, version: str) -> InferRequest:
    if len(config.input) != 1:
        raise InvalidArgument(
            f"{id_label('')}Raw request must only have 1 input (found 1) to be deduced but got {len(config.input)} "
            f"inputs in '{model}' model configuration"
        )
    declared = config.input[0]
    datatype = datatype_name(declared.data_type)
    _check_deducible(declared, datatype)
    if datatype == "BYTES":  # the body is the one element
        shape = [1] * len(declared.dims)
    else:
        shape = _deduced_shape(declared.dims, len(body), NUMPY_DTYPES[datatype].itemsize)
    if config.max_batch_size > 0:
        shape = [1, *shape]
    if datatype == "BYTES":
        tensor = shaped(declared.name, datatype, object_array([copied(body)]), shape)
        return infer_request((model, version), {declared.name: tensor}, NO_PARAMETERS)
    try:
        tensor = decode_tensor(declared.name, datatype, shape, body, model=model)
    except WrongSize as error:
        raise InvalidArgument(id_label("") + str(error)) from error
    return infer_request((model, version), {declared.name: tensor}, NO_PARAMETERS)


def _check_deducible(declared: ModelInput, datatype: str) -> None:
    """Refuse a raw request whose shape cannot be deduced."""
    dims = list(declared.dims)
    if datatype == "BYTES" and set(dims) != {1}:
        raise InvalidArgument(
            f"{id_label('')}For BYTE datatype raw input '{declared.name}', the model must have input shape [1]"
        )
    if sum(dim < 0 for dim in dims) > 1:
        raise InvalidArgument(
            f"{id_label('')}The shape of the raw input '{declared.name}' can not be deduced because there are more "
            "than one variable-sized dimension"
        )


def _deduced_shape(dims: list[int], size: int, itemsize: int) -> list[int]:
    """The declared dims, with the first variable one computed from the number of bytes."""
    fixed = math.prod(dim for dim in dims if dim >= 0)
    free = size // (fixed * itemsize) if fixed else 0
    shape: list[int] = []
    for dim in dims:
        shape.append(dim if dim >= 0 else free)
        free = free if dim >= 0 else 1
    return shape
