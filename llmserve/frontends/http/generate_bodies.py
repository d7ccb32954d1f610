"""Converts bodies of `generate` and `generate_stream`: a flat JSON object to tensors, responses to flat objects.

Keys that name an input of the model are tensors (a scalar is one element; lists, however nested, are the elements in
order); other keys are request parameters.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Container, Mapping
from contextlib import aclosing
from typing import NoReturn

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInput

from llmserve.errors import InternalError, InvalidArgument, LlmserveError
from llmserve.frontends.http.infer_bodies import infer_request, sort_http_parameters
from llmserve.frontends.http.infer_outputs import BINARY_ONLY, json_values
from llmserve.frontends.http.json_fields import (
    Json,
    Repeating,
    as_object,
    as_string,
    encode_json,
    flatten,
    parse_json,
    tensor_values,
)
from llmserve.frontends.shared.data_source import DataSource
from llmserve.frontends.shared.raw_tensors import Raw, shaped
from llmserve.serving.signature import datatype_name, id_label
from llmserve.serving.types import InferRequest, InferResponse, Tensor

ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response, "
    "use generate stream for model that generates various number of responses"
)


def parse_generate(body: Raw, config: ModelConfig, source: DataSource, *, model: str, version: str) -> InferRequest:
    """The core's request for a flat JSON object."""
    parsed = parse_json(body, source.share, notes_repeats=True)
    if not isinstance(parsed, dict):
        raise InternalError("attempt to get members for non-object")
    document = dict(parsed)
    request_id = as_string(document.pop("id", ""), "id")
    if "parameters" in document and all(entry.name != "parameters" for entry in config.input):
        document = _flattened(document, declared={entry.name for entry in config.input})
    declared = {entry.name: entry for entry in config.input}
    if isinstance(parsed, Repeating) and (name := next((name for name in parsed.repeated if name in declared), "")):
        raise InvalidArgument(f"{id_label(request_id)}input '{name}' already exists in request")
    inputs = {
        name: _input_tensor(declared[name], value, source, batched=config.max_batch_size > 0)
        for name, value in document.items()
        if name in declared
    }
    parameters = {name: value for name, value in document.items() if name not in declared}
    return infer_request((model, version), inputs, sort_http_parameters(parameters), request_id=request_id)


def _flattened(document: Mapping[str, Json], declared: Container[str]) -> dict[str, Json]:
    """Moves the members of `parameters` to the top level, including inputs of the model."""
    flat = dict(document)
    for name, value in as_object(flat.pop("parameters"), "parameters").items():
        if name in declared and name in document:
            raise InvalidArgument(f"Converting keyword: 'parameters': input '{name}' already exists in request")
        if name not in declared and not isinstance(value, str | bool | int | float):
            raise InvalidArgument(
                f"Converting keyword: 'parameters': parameter '{name}' has invalid type. "
                "It should be either 'int', 'bool', or 'string'."
            )
        flat[name] = value
    return flat


def _input_tensor(declared: ModelInput, value: Json, source: DataSource, *, batched: bool) -> Tensor:
    datatype = datatype_name(declared.data_type)
    if datatype in BINARY_ONLY:
        raise InvalidArgument(
            f"receiving {datatype} data via JSON is not supported. "
            f"Please use the binary data format for input {declared.name}"
        )
    leaves = flatten(value)
    shape = _fitting_shape([-1, *declared.dims] if batched else list(declared.dims), len(leaves))
    if shape is None:
        _refuse_form(declared.name)
    if datatype == "BYTES":
        source.expect_texts(declared.name, len(leaves))
    return shaped(declared.name, datatype, tensor_values(leaves, datatype), shape)


def _fitting_shape(dims: list[int], count: int) -> list[int] | None:
    """`dims` with the last variable one computed from the number of elements, and 1 for the others; None: no fit."""
    fixed = math.prod(dim for dim in dims if dim >= 0)
    variable = [place for place, dim in enumerate(dims) if dim < 0]
    shape = [1 if dim < 0 else dim for dim in dims]
    if variable and fixed:
        shape[variable[-1]] = count // fixed
    return shape if math.prod(shape) == count else None


def _refuse_form(name: str) -> NoReturn:
    raise InvalidArgument(f"The schema can not convert input '{name}' to tensor with proper shape")


def generate_document(response: InferResponse) -> dict[str, Json]:
    """One response as a flat object, sorted by key: outputs of one element are scalars, the others flat lists."""
    document: dict[str, Json] = {"model_name": response.model_name, "model_version": response.model_version}
    if response.request_id:
        document["id"] = response.request_id
    document |= response.parameters
    for tensor in response.outputs:
        values = json_values(tensor)
        document[tensor.name] = values[0] if len(values) == 1 else values
    return dict(sorted(document.items()))


async def data_responses(
    stream: AsyncGenerator[InferResponse, None], *, decoupled: bool
) -> AsyncGenerator[InferResponse, None]:
    """The responses for the client, without those that only mark the end of a decoupled request."""
    async with aclosing(stream):
        async for response in stream:
            if response.outputs or response.error is not None or not (decoupled and response.final):
                yield response


async def generated(responses: AsyncGenerator[InferResponse, None]) -> dict[str, Json]:
    """The answer of `generate`: the model's one response; raises its error."""
    answers: list[dict[str, Json]] = []
    async with aclosing(responses):
        async for response in responses:
            if response.error is not None:
                raise response.error
            answers.append(generate_document(response))
            if len(answers) > 1:
                break
    return answers[0] if len(answers) == 1 else {"error": ONE_RESPONSE}


def event(response: InferResponse) -> bytes:
    if response.error is not None:
        return error_event(response.error)
    try:
        return _data(generate_document(response))
    except LlmserveError as error:  # an output that JSON cannot represent
        return error_event(error)


def error_event(error: LlmserveError) -> bytes:
    return _data({"error": str(error)})


def _data(document: Json) -> bytes:
    return b"data: " + encode_json(document) + b"\n\n"
