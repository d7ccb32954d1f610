"""Converts the core's responses to messages of `inference.GRPCInferenceService`."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from tritonclient.grpc import service_pb2

from llmserve.frontends.grpc.wire_fields import LENGTH_DELIMITED, encoded_varint
from llmserve.frontends.shared.delivery import Delivery
from llmserve.frontends.shared.raw_tensors import Raw, encode_tensor, encoding_cost, num_bytes, tensor_bytes
from llmserve.serving.types import InferResponse, ParameterValue
from llmserve.wire.http2.messages import LargeMessage

FINAL_RESPONSE = "triton_final_response"
RAW_OUTPUTS = 6  # of ModelInferResponse
STREAM_RESPONSE = 2  # of ModelStreamInferResponse: infer_response


def infer_message(response: InferResponse, *, elsewhere: Container[str] = ()) -> service_pb2.ModelInferResponse:
    """A response with outputs. Tensors are sent as raw bytes, except those that are `elsewhere`."""
    message = service_pb2.ModelInferResponse()
    _write_response(message, response, elsewhere)
    return message


def _write_response(
    message: service_pb2.ModelInferResponse, response: InferResponse, elsewhere: Container[str]
) -> None:
    _write_heads(message, response)
    for tensor in response.outputs:
        message.raw_output_contents.append(b"" if tensor.name in elsewhere else encode_tensor(tensor))


def _write_heads(message: service_pb2.ModelInferResponse, response: InferResponse) -> None:
    message.model_name = response.model_name
    message.model_version = response.model_version
    message.id = response.request_id
    for tensor in response.outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    if response.parameters:
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


def large_cost(response: InferResponse, delivery: Delivery) -> int:
    """The approximate bytes that are converted one by one, or copied, to deliver and encode a large response."""
    copied = 0 if delivery.is_plain else num_bytes(response.outputs)
    return encoding_cost(response.outputs) + copied


def large_infer_message(response: InferResponse, *, elsewhere: Container[str] = ()) -> LargeMessage:
    """Like `infer_message`, for large responses."""
    return LargeMessage(_large_parts(service_pb2.ModelInferResponse(), response, elsewhere))


def large_stream_message(response: InferResponse, *, decoupled: bool, elsewhere: Container[str] = ()) -> LargeMessage:
    """Like `stream_message`, for large responses without an error."""
    inner = service_pb2.ModelInferResponse()
    inner.parameters[FINAL_RESPONSE].bool_param = response.final or not decoupled
    parts = _large_parts(inner, response, elsewhere)
    return LargeMessage([_field_head(STREAM_RESPONSE, sum(map(len, parts))), *parts])


def _large_parts(
    message: service_pb2.ModelInferResponse, response: InferResponse, elsewhere: Container[str]
) -> list[Raw]:
    """The message without its data, then the data in parts, because protobuf would copy it several times."""
    _write_heads(message, response)
    parts: list[Raw] = [message.SerializeToString()]
    for tensor in response.outputs:
        data = b"" if tensor.name in elsewhere else tensor_bytes(tensor)
        parts.append(_field_head(RAW_OUTPUTS, len(data)))
        if data:
            parts.append(data)
    return parts


def _field_head(number: int, size: int) -> bytes:
    return encoded_varint(number << 3 | LENGTH_DELIMITED) + encoded_varint(size)


def stream_message(
    response: InferResponse, *, decoupled: bool, elsewhere: Container[str] = ()
) -> service_pb2.ModelStreamInferResponse:
    """The message of `ModelStreamInfer` for one response of the core, which may be an error."""
    message = service_pb2.ModelStreamInferResponse()
    if response.error is not None:
        message.error_message = str(response.error)
        message.infer_response.id = response.request_id
        message.infer_response.model_name = response.model_name
    else:
        _write_response(message.infer_response, response, elsewhere)
    final = response.final or (not decoupled and response.error is None)
    message.infer_response.parameters[FINAL_RESPONSE].bool_param = final
    return message


def empty_final_message(response: InferResponse) -> service_pb2.ModelStreamInferResponse:
    """Marks the end of a decoupled request after a last data response that did not; no version, no outputs."""
    inner = service_pb2.ModelInferResponse(model_name=response.model_name, id=response.request_id)
    inner.parameters[FINAL_RESPONSE].bool_param = True
    return service_pb2.ModelStreamInferResponse(infer_response=inner)


def early_error_message(request_id: str, error: BaseException) -> service_pb2.ModelStreamInferResponse:
    """The message for a request that failed before a model answered, so only its id is known."""
    return service_pb2.ModelStreamInferResponse(
        error_message=str(error), infer_response=service_pb2.ModelInferResponse(id=request_id)
    )
