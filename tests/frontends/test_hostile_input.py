"""Whatever bytes arrive, parsing ends in a request or in an error of ours: never another exception, never a hang."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from llmserve.errors import Code, LlmserveError, ResourceExhausted
from llmserve.frontends.grpc import status_of
from llmserve.frontends.grpc_messages import parse_request
from llmserve.frontends.http_answers import STATUS, error_response
from llmserve.frontends.http_generate import parse_generate
from llmserve.frontends.http_infer import parse_infer
from llmserve.serving.types import NUMPY_DTYPES, InferRequest
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
CORE = StubCore()
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # of busy machines


@patient
@given(
    st.one_of(ANY_JSON, REQUESTS), st.binary(max_size=20), st.none() | st.integers(-9, 99) | st.text(max_size=3), MODELS
)
def test_infer_bodies(document: Any, tail: bytes, header: Any, model: str) -> None:
    text = json.dumps(document).encode()
    length = None if header is None else str(len(text) if isinstance(header, int) and header > 50 else header)
    with suppress(LlmserveError):
        request, _ = parse_infer(text + tail, length, CORE.model_config(model), model=model, version="")
        assert isinstance(request, InferRequest)


@patient
@given(ANY_JSON | st.dictionaries(st.sampled_from(["TEXT", "N", "INPUT0", "id", "parameters"]), ANY_JSON), MODELS)
def test_generate_bodies(document: Any, model: str) -> None:
    with suppress(LlmserveError):
        request = parse_generate(json.dumps(document).encode(), CORE.model_config(model), model=model, version="")
        assert isinstance(request, InferRequest)


@patient
@given(st.binary(max_size=100), MODELS)
def test_bodies_that_are_no_json(body: bytes, model: str) -> None:
    with suppress(LlmserveError):
        parse_generate(body, CORE.model_config(model), model=model, version="")
    with suppress(LlmserveError):
        parse_infer(body, None, CORE.model_config(model), model=model, version="")


@patient
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
        request = parse_request(message, CORE.model_config("echo"), deadline=None)
        assert len(request.inputs) == len(tensors)


@patient
@given(st.binary(max_size=200))
def test_messages_from_random_bytes(data: bytes) -> None:
    with suppress(DecodeError, LlmserveError):
        parse_request(service_pb2.ModelInferRequest.FromString(data), CORE.model_config("echo"), deadline=None)


@pytest.mark.parametrize("code", list(Code))
def test_every_code_has_a_place_on_both_wires(code: Code) -> None:
    error = type("AnyError", (LlmserveError,), {"code": code})("text")
    assert isinstance(status_of(error), grpc.StatusCode)
    assert status_of(error).name == code.name
    assert error_response(error).status_code == STATUS[code] >= 400


def test_a_full_queue_says_when_to_come_back() -> None:
    response = error_response(ResourceExhausted("the queue is full"))
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
