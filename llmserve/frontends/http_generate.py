"""`POST .../generate` and `.../generate_stream`: a flat JSON object to tensors, responses to flat JSON objects.

Keys that name an input of the model are tensors (a scalar is one element); the others are request parameters.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInput

from llmserve.errors import InvalidArgument, LlmserveError
from llmserve.frontends.http_infer import BINARY_ONLY, infer_request, json_values, sort_http_parameters
from llmserve.frontends.http_json import Json, as_object, as_string, encode_json, flatten, parse_json, tensor_values
from llmserve.frontends.tensors import shaped
from llmserve.serving.signature import datatype_name
from llmserve.serving.types import InferRequest, InferResponse, Tensor

ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response, "
    "use generate stream for model that generates various number of responses"
)


def parse_generate(body: bytes, config: ModelConfig, *, model: str, version: str) -> InferRequest:
    """The core's request for a flat JSON object."""
    document = dict(as_object(parse_json(body), "request"))
    request_id = as_string(document.pop("id", ""), "id")
    declared = {entry.name: entry for entry in config.input}
    inputs = {
        name: _input_tensor(declared[name], value, batched=config.max_batch_size > 0)
        for name, value in document.items()
        if name in declared
    }
    parameters = {name: value for name, value in document.items() if name not in declared}
    if "parameters" in parameters:
        parameters |= _nested_parameters(parameters.pop("parameters"))
    return infer_request(model, version, inputs, sort_http_parameters(parameters), request_id=request_id)


def _nested_parameters(value: Json) -> Mapping[str, Json]:
    nested = as_object(value, "parameters")
    for name, item in nested.items():
        if not isinstance(item, str | bool | int | float):
            raise InvalidArgument(
                f"Converting keyword: 'parameters': parameter '{name}' has invalid type. "
                "It should be either 'int', 'bool', or 'string'."
            )
    return nested


def _input_tensor(declared: ModelInput, value: Json, *, batched: bool) -> Tensor:
    datatype = datatype_name(declared.data_type)
    if datatype in BINARY_ONLY:
        raise InvalidArgument(
            f"receiving {datatype} data via JSON is not supported. "
            f"Please use the binary data format for input {declared.name}"
        )
    leaves = flatten(value)
    shape = [1, len(leaves)] if batched else [len(leaves)]
    return shaped(declared.name, datatype, tensor_values(leaves, datatype), shape)


def generate_document(response: InferResponse) -> dict[str, Json]:
    """One response as a flat object: outputs of one element are scalars, the others flat lists."""
    document: dict[str, Json] = {"model_name": response.model_name, "model_version": response.model_version}
    if response.request_id:
        document["id"] = response.request_id
    document |= response.parameters
    for tensor in response.outputs:
        values = json_values(tensor)
        document[tensor.name] = values[0] if len(values) == 1 else values
    return document


async def data_responses(
    stream: AsyncGenerator[InferResponse, None], *, decoupled: bool
) -> AsyncGenerator[InferResponse, None]:
    """The responses that a client sees: without those that only say that a decoupled request is over."""
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
    except LlmserveError as error:  # an output that JSON cannot carry
        return error_event(error)


def error_event(error: LlmserveError) -> bytes:
    return _data({"error": str(error)})


def _data(document: Json) -> bytes:
    return b"data: " + encode_json(document) + b"\n\n"
