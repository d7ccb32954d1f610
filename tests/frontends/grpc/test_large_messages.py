"""Large messages are read as protobuf reads them, though protobuf does not read their data."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from llmserve.errors import LlmserveError
from llmserve.frontends.grpc import packed_values
from llmserve.frontends.grpc.infer_messages import ModelInferRequest, parse_request
from llmserve.frontends.grpc.large_messages import MAX_FIELDS, MAX_KEPT_BYTES, parse_large
from llmserve.frontends.grpc.response_messages import large_infer_message, large_stream_message, stream_message
from llmserve.frontends.shared.data_source import MAX_TEXTS, DataSource
from llmserve.frontends.shared.shared_memory import SharedMemory
from llmserve.serving.types import InferResponse, Tensor
from llmserve.wire.request_memory import RequestMemory, RequestTooLarge
from tests.frontends.stub_core import StubCore
from tests.hostile.attacks import field

CONFIG = StubCore().model_config("echo")
MEMORY = RequestMemory()
INT32, INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
UINT32, UINT64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
CONTENTS = st.fixed_dictionaries(
    {},
    optional={
        "bool_contents": st.lists(st.booleans(), max_size=4),
        "int_contents": st.lists(INT32, max_size=4),
        "int64_contents": st.lists(INT64, max_size=4),
        "uint_contents": st.lists(UINT32, max_size=4),
        "uint64_contents": st.lists(UINT64, max_size=4),
        "fp32_contents": st.lists(st.floats(width=32), max_size=4),
        "fp64_contents": st.lists(st.floats(), max_size=4),
        "bytes_contents": st.lists(st.binary(max_size=3), max_size=4),
    },
)
DATATYPES = st.sampled_from(
    ("BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FP32", "FP64", "BYTES", "FP16")
)
INPUTS = st.lists(st.tuples(DATATYPES, st.lists(st.integers(-1, 4), max_size=2), st.none() | CONTENTS), max_size=3)
ONE_KIND = st.sampled_from(
    [("INT8", "int_contents"), ("INT32", "int_contents"), ("UINT16", "uint_contents"), ("UINT64", "uint64_contents")]
)


def message(inputs: Any, raw: list[bytes]) -> bytes:
    request = service_pb2.ModelInferRequest(model_name="echo", id="7", raw_input_contents=raw)
    request.parameters["a"].string_param = "b"
    request.outputs.add(name="X0")
    for number, (datatype, shape, contents) in enumerate(inputs):
        tensor = request.inputs.add(name=f"X{number}", datatype=datatype, shape=shape)
        if contents is not None:
            tensor.contents.CopyFrom(service_pb2.InferTensorContents(**contents))
    data: bytes = request.SerializeToString()
    return data


def outcome(request: ModelInferRequest) -> str:
    """Of parsing, in a form that can be compared."""
    try:
        parsed, _ = parse_request(request, CONFIG, DataSource(SharedMemory(), MEMORY.share()), deadline=None)
    except LlmserveError as error:
        text = re.sub(r"integer -?\d+ out of bounds", "integer out of bounds", str(error))  # of several, it names any
        return f"{type(error).__name__}: {text}"
    tensors = [(tensor.name, tensor.datatype, tensor.shape, tensor.data.tolist()) for tensor in parsed.inputs.values()]
    return repr((tensors, parsed.model_name, parsed.request_id, parsed.parameters, parsed.requested_outputs))


def large(data: bytes) -> Any:
    return parse_large(data, MEMORY.share())


@given(INPUTS, st.lists(st.binary(max_size=9), max_size=3))
def test_large_messages_are_read_as_small_ones_are(inputs: Any, raw: list[bytes]) -> None:
    data = message(inputs, raw)
    assert outcome(large(data)) == outcome(service_pb2.ModelInferRequest.FromString(data))


@given(ONE_KIND, st.data())
def test_numbers_in_small_pieces(kind: tuple[str, str], data: st.DataObject) -> None:
    datatype, name = kind
    values = data.draw(st.lists(UINT32 if name.startswith("uint") else INT32, min_size=1, max_size=30))
    encoded = message([(datatype, [len(values)], {name: values})], [])
    with pytest.MonkeyPatch.context() as small:
        small.setattr(packed_values, "PIECE_BYTES", 11)
        found = outcome(large(encoded))
    expected = outcome(service_pb2.ModelInferRequest.FromString(encoded))
    assert found.split("for INT8")[0].split("value")[0] == expected.split("for INT8")[0].split("value")[0]


@given(INPUTS, st.lists(st.binary(max_size=9), max_size=2), st.integers(0, 200), st.binary(max_size=3))
def test_broken_messages_are_refused(inputs: Any, raw: list[bytes], position: int, noise: bytes) -> None:
    """What protobuf takes may be refused (groups, which nobody sends); what it refuses is never taken."""
    whole = message(inputs, raw)
    data = whole[:position] + noise + whole[position + len(noise) :]
    try:
        expected = outcome(service_pb2.ModelInferRequest.FromString(data))
    except DecodeError:
        with pytest.raises(DecodeError):
            large(data)
        return
    try:
        assert outcome(large(data)) == expected
    except DecodeError as error:
        assert "kind" in str(error) or "type" in str(error)  # noqa: PT017


def test_numbers_that_are_not_packed() -> None:
    contents = b"\x10\x07\x10\x08" + field(2, b"\x09")  # 7 and 8 alone, 9 packed
    data = message([("INT32", [3], None)], []).replace(b"", b"", 0)
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="X", datatype="INT32", shape=[3])
    data = field(1, b"echo") + field(5, tensor.SerializeToString() + field(5, contents))
    assert "[7, 8, 9]" in outcome(large(data))


@pytest.mark.parametrize("number", [4, 5, 6, 1])
def test_too_many_fields_are_refused(number: int) -> None:
    with pytest.raises(RequestTooLarge, match="fields"):
        large(field(number, b"") * (MAX_FIELDS + 1))


def test_long_names_and_parameters_are_refused() -> None:
    """They are read in one piece, which stops all others."""
    request = service_pb2.ModelInferRequest(id="x" * (MAX_KEPT_BYTES // 2))
    assert large(request.SerializeToString()).id == request.id
    request.inputs.add(name="x" * (MAX_KEPT_BYTES // 2 + 1), datatype="INT32", shape=[0])
    with pytest.raises(RequestTooLarge, match="besides the data of its tensors"):
        large(request.SerializeToString())


def test_too_many_texts_are_refused() -> None:
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="X", datatype="BYTES", shape=[MAX_TEXTS + 1])
    with pytest.raises(RequestTooLarge, match="elements"):
        large(field(5, tensor.SerializeToString() + field(5, b"\x42\0" * (MAX_TEXTS + 1))))
    request = service_pb2.ModelInferRequest(raw_input_contents=[b"\0\0\0\0" * (MAX_TEXTS + 1)])
    request.inputs.append(tensor)
    assert outcome(request).startswith("RequestTooLarge")


@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_large_answers_are_the_same_messages(datatype: str) -> None:
    values = np.arange(40_000, dtype=np.float32).reshape(2, -1)
    data = values if datatype == "FP32" else values.astype(str).astype(np.bytes_).astype(object)
    outputs = (Tensor("Y", datatype, data), Tensor("Z", "INT32", np.zeros(0, np.int32)))
    response = InferResponse("m", "1", "7", outputs=outputs, parameters={"a": 1}, final=True)
    reply = large_infer_message(response)
    whole = service_pb2.ModelInferResponse.FromString(b"".join(reply.parts))
    assert (whole.id, len(whole.raw_output_contents), whole.raw_output_contents[1]) == ("7", 2, b"")
    streamed = large_stream_message(response, decoupled=True)
    expected = stream_message(response, decoupled=True)
    assert service_pb2.ModelStreamInferResponse.FromString(b"".join(streamed.parts)) == expected


@pytest.mark.parametrize(
    ("datatype", "name", "num_bytes"),
    [
        ("FP32", "fp32_contents", 0),
        ("INT32", "int_contents", 4 * 40_000),
        ("INT64", "int64_contents", 8 * 40_000),
        ("BOOL", "bool_contents", 40_000),
    ],
)
def test_numbers_count_for_what_they_take_beside_their_message(datatype: str, name: str, num_bytes: int) -> None:
    """Each is one byte long here, but for floats, which stay where they are."""
    share = MEMORY.share()
    (parsed,) = parse_large(message([(datatype, [40_000], {name: [1] * 40_000})], []), share).inputs
    assert len(getattr(parsed.contents, name)) == 40_000
    assert share.num_bytes == num_bytes
