"""Whatever bytes arrive, parsing ends in a request or in an error of ours: never another exception, never a hang."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from llmserve.errors import Code, InternalError, InvalidArgument, LlmserveError, RateLimited
from llmserve.frontends.grpc.error_status import status_of as status_of_grpc
from llmserve.frontends.grpc.infer_messages import parse_request
from llmserve.frontends.http import large_json, large_json_text
from llmserve.frontends.http.error_answers import STATUS, error_response
from llmserve.frontends.http.generate_bodies import parse_generate
from llmserve.frontends.http.infer_bodies import parse_infer
from llmserve.frontends.http.json_fields import PARSED_AT_ONCE, parse_json, tensor_values
from llmserve.frontends.http.large_json_text import Malformed
from llmserve.frontends.http.numbers import Numbers, leaves_of
from llmserve.frontends.shared.data_source import DataSource
from llmserve.frontends.shared.shared_memory import SharedMemory
from llmserve.serving.types import NUMPY_DTYPES, InferRequest
from llmserve.wire.request_memory import RequestMemory, RequestTooLarge
from tests.frontends.stub_core import CONFIGS, StubCore

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-2, 3), st.floats(), st.text(max_size=4),
    st.sampled_from(["X", "TEXT", "N", *NUMPY_DTYPES]),
)  # fmt: skip
NAMES = st.sampled_from(
    ["inputs", "outputs", "name", "shape", "datatype", "data", "parameters", "id", "binary_data_size", "priority", "N",
     "binary_data_output", "binary_data", "sequence_id", "timeout", "TEXT", "INPUT0"]
)  # fmt: skip
ANY_JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5), max_leaves=20
)
ROWS = st.recursive(
    st.integers(-(2**63), 2**63 - 1) | st.floats(), lambda inner: st.lists(inner, max_size=4), max_leaves=20
)
INPUTS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["X", "Y"]),
        "shape": st.lists(st.integers(-1, 4) | ANY_JSON, max_size=3),
        "datatype": st.sampled_from([*NUMPY_DTYPES, "fp32"]) | ANY_JSON,
    },
    optional={"data": ANY_JSON, "parameters": st.dictionaries(NAMES, SCALARS, max_size=2)},
)
REQUESTS = st.fixed_dictionaries({"inputs": st.lists(INPUTS, max_size=3)}, optional={"parameters": ANY_JSON})
MODELS = st.sampled_from(sorted(CONFIGS))
HIGH, LOW = r"\\ud[89ab][0-9a-f]{2}", r"\\ud[c-f][0-9a-f]{2}"
UNPAIRED = re.compile(f"{HIGH}(?!{LOW})")  # escapes as `json.dumps` writes them
CORE = StubCore()
MEMORY = SharedMemory(allowed=True)
REQUESTS_MEMORY = RequestMemory()


def source() -> DataSource:
    return DataSource(MEMORY, REQUESTS_MEMORY.share())


@given(
    st.one_of(ANY_JSON, REQUESTS), st.binary(max_size=20), st.none() | st.integers(-9, 99) | st.text(max_size=3), MODELS
)
def test_infer_bodies(document: Any, tail: bytes, header: Any, model: str) -> None:
    text = json.dumps(document).encode()
    length = None if header is None else str(len(text) if isinstance(header, int) and header > 50 else header)
    with suppress(LlmserveError):
        request, _ = parse_infer(text + tail, length, CORE.model_config(model), source(), version="")
        assert isinstance(request, InferRequest)


@given(ANY_JSON | st.dictionaries(st.sampled_from(["TEXT", "N", "INPUT0", "id", "parameters"]), ANY_JSON), MODELS)
def test_generate_bodies(document: Any, model: str) -> None:
    with suppress(LlmserveError):
        request = parse_generate(
            json.dumps(document).encode(), CORE.model_config(model), source(), model=model, version=""
        )
        assert isinstance(request, InferRequest)


@given(st.binary(max_size=100), MODELS)
def test_bodies_that_are_no_json(body: bytes, model: str) -> None:
    with suppress(LlmserveError):
        parse_generate(body, CORE.model_config(model), source(), model=model, version="")
    with suppress(LlmserveError):
        parse_infer(body, None, CORE.model_config(model), source(), version="")


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*NUMPY_DTYPES, "nonsense"]),
            st.lists(st.integers(-1, 3) | st.integers(-(2**63), 2**63 - 1), max_size=3),
            st.sampled_from([{}, {"int_contents": [1, 300]}, {"fp32_contents": [1.0]}, {"bytes_contents": [b"x"]}]),
        ),
        max_size=3,
    ),
    st.lists(st.binary(max_size=12), max_size=3),
)
def test_grpc_tensors(tensors: list[tuple[str, list[int], dict[str, Any]]], raw: list[bytes]) -> None:
    message = service_pb2.ModelInferRequest(model_name="echo", raw_input_contents=raw)
    for index, (datatype, shape, contents) in enumerate(tensors):
        tensor = message.inputs.add(name=f"X{index}", datatype=datatype, shape=shape)
        if contents:
            tensor.contents.CopyFrom(service_pb2.InferTensorContents(**contents))
    with suppress(LlmserveError):
        request, _ = parse_request(message, CORE.model_config("echo"), source(), deadline=None)
        assert len(request.inputs) == len(tensors)


@given(st.binary(max_size=200))
def test_messages_from_random_bytes(data: bytes) -> None:
    with suppress(DecodeError, LlmserveError):
        parse_request(
            service_pb2.ModelInferRequest.FromString(data), CORE.model_config("echo"), source(), deadline=None
        )


@pytest.mark.parametrize("code", list(Code))
def test_every_code_has_a_place_on_both_wires(code: Code) -> None:
    error = type("AnyError", (LlmserveError,), {"code": code})("text")
    assert isinstance(status_of_grpc(error), grpc.StatusCode)
    assert status_of_grpc(error).name == code.name
    assert error_response(error).status == STATUS[code] >= 400


def test_a_limit_of_the_clients_own_is_no_fault_of_the_server() -> None:
    answer = error_response(RateLimited("no tokens are left", retry_after_s=2.2).at("in ensemble 'e'"))
    assert (answer.status, answer.headers["Retry-After"]) == (429, "3")
    assert status_of_grpc(RateLimited("text")) is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("data", [{"data": []}, {"parameters": {"binary_data_size": 4}}], ids=["json", "binary"])
@pytest.mark.parametrize(
    ("dims", "words"), [(40_000, "unusable shape of 40000 dimensions"), (64, "it has too many elements")]
)
def test_shapes_whose_product_is_astronomic(data: dict[str, Any], dims: int, words: str) -> None:
    tensor = {"name": "X", "datatype": "FP32", "shape": [2**64 - 1] * dims, **data}
    document = json.dumps({"inputs": [tensor]}).encode()
    start = time.monotonic()
    with pytest.raises(InvalidArgument, match=words) as caught:
        parse_infer(document + b"1234", str(len(document)), CORE.model_config("echo"), source(), version="")
    assert time.monotonic() - start < 20
    assert len(str(caught.value)) < 2000


def parsed(parse: Callable[[str], Any], text: str) -> str:
    """The document or the error, in a form that can be compared (NaN included)."""
    try:
        return repr(comparable(parse(text)))
    except (json.JSONDecodeError, Malformed) as error:
        return f"{error.msg} at {error.pos}"
    except RecursionError:
        return "too deep"
    except UnicodeEncodeError:
        return "no text"


def comparable(value: Any) -> Any:
    """Arrays of nothing but numbers as their leaves; integers beside floats, or below every type's, as floats."""
    if isinstance(value, dict):
        return {name: comparable(member) for name, member in value.items()}
    if not isinstance(value, list | Numbers):
        return value
    leaves = (
        [each for piece in value._pieces for each in piece.tolist()] if isinstance(value, Numbers) else leaves_of(value)
    )
    kinds = set(map(type, leaves))
    if kinds <= {int, float} and (float in kinds or min(leaves, default=0) < -(2**63)):
        return [float(leaf) if abs(leaf) < 1e300 else "large" for leaf in leaves]
    if kinds <= {int, float} or kinds == {bool}:
        return leaves
    return [comparable(item) for item in value] if isinstance(value, list) else leaves


def loads_large(text: str) -> Any:
    return large_json.loads_large(text.encode(), REQUESTS_MEMORY.share())


@given(
    ANY_JSON | st.lists(st.integers() | st.floats()) | ROWS,
    st.integers(0, 200),
    st.sampled_from(["", ",", "]", "[", " "]),
)
@example("\U00010000", 7, ",")  # between the escapes of its two halves
@example("\U00010000", 12, ",")  # within the second one
@example([-(2**63) - 1], 0, "")
def test_large_documents_are_read_as_small_ones_are(document: Any, position: int, mark: str) -> None:
    """Well-formed and, with a stray mark, malformed; arrays of scalars in pieces of a few characters.

    A mark in a surrogate pair leaves half of it, which `json.loads` would accept and its callers refuse later.
    """
    text = json.dumps(document)
    text = text[:position] + mark + text[position:]
    with pytest.MonkeyPatch.context() as small:
        small.setattr(large_json, "FEW_BYTES", 0)
        small.setattr(large_json, "MIN_RUN_BYTES", 0)
        small.setattr(large_json, "PIECE_BYTES", 3)
        small.setattr(large_json_text, "TEXT_PIECE_BYTES", 13)
        large = parsed(loads_large, text)
    assert large == parsed(json.loads, text) or (large == "no text" and UNPAIRED.search(text))


@pytest.mark.parametrize("text", ["[1,,2]", "[1,]", "[,1]", "[1 2]", "[", "[ ]", "[1,2", "[" * 5000, '{"a": [1, 2}'])
def test_malformed_large_documents(text: str) -> None:
    assert parsed(loads_large, text) == parsed(json.loads, text)


@pytest.mark.parametrize("value", ["[]", "[1,[]]", "[[[]]]"])
def test_arrays_with_nothing_in_them_are_limited_in_number(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 MiB of them took 20 s of the one thread that decodes large bodies. Rows of numbers have no such limit."""
    monkeypatch.setattr(large_json, "MAX_VALUES", 4096)
    with pytest.raises(RequestTooLarge, match="more than 4096 JSON values"):
        loads_large(f"[{','.join([value] * 8192)}]")
    assert len(loads_large(f"[{','.join(['[1.5,2.5]'] * 8192)}]")) == 2 * 8192


def test_other_threads_run_while_a_large_document_is_parsed() -> None:
    body = b'{"data": [' + b",".join([b"1"] * 4_000_000) + b"]}"
    beats = 0
    done = threading.Event()

    def beat() -> None:
        nonlocal beats
        while not done.wait(0.001):
            beats += 1

    heart = threading.Thread(target=beat)
    heart.start()
    document = parse_json(body, REQUESTS_MEMORY.share())
    done.set()
    heart.join()
    assert len(document["data"]) == 4_000_000
    assert beats > 5  # json.loads: one before it, none while it holds the interpreter's lock


def test_a_large_document_keeps_its_checks() -> None:
    padding = b" " * PARSED_AT_ONCE
    with pytest.raises(InternalError, match="surrogates not allowed"):
        parse_json(b'["\\ud800"]' + padding, REQUESTS_MEMORY.share())
    assert parse_json(b'["\\u0416"]' + padding, REQUESTS_MEMORY.share()) == ["Ж"]
    with pytest.raises(InternalError, match="nested too deeply"):
        parse_json(b"[" * 100_000 + b"]" * 100_000 + padding, REQUESTS_MEMORY.share())
    numbers = list(range(50_000))
    assert tensor_values(numbers, "INT32").tolist() == numbers
    with pytest.raises(InternalError, match="'data'"):
        tensor_values([*numbers, 2**31], "INT32")
