"""Headers and metadata that the model gets as request parameters."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from llmserve.errors import InvalidArgument
from llmserve.frontends.shared.forwarded_headers import ForwardedHeaders
from tests.frontends.http.test_inference_api import Http
from tests.frontends.server import RunningServer, running_server
from tests.frontends.stub_core import StubCore

BODY = {"inputs": [], "parameters": {"x-team": "mine", "other": 1}}


@pytest.fixture(scope="module")
def forwarding() -> Iterator[RunningServer]:
    with running_server(StubCore, headers=ForwardedHeaders.matching("x-t.*", "--flag")) as running:
        yield running


def seen(server: RunningServer) -> dict[str, object]:
    """The parameters of the last request."""
    assert isinstance(server.core, StubCore)
    return dict(server.core.requests[-1].parameters)


def test_over_http(forwarding: RunningServer) -> None:
    call = Http(forwarding.http_port)
    assert call("POST", "/v2/models/echo/infer", BODY, {"X-Team": "red", "y": "2"})[0] == 200
    assert seen(forwarding) == {"x-team": "red", "other": 1}
    assert call("POST", "/v2/models/echo/generate", {"TEXT": "a"}, {"pre-x-t": "1"})[0] == 200
    assert seen(forwarding) == {"pre-x-t": "1"}
    assert call("POST", "/v2/models/echo/infer", BODY)[0] == 200
    assert seen(forwarding) == BODY["parameters"]
    call.connection.close()


def test_over_grpc(forwarding: RunningServer) -> None:
    request = service_pb2.ModelInferRequest(model_name="echo")
    metadata = (("x-team", "red"), ("x-team", "blue"), ("y", "2"), ("x-t-bin", b"\xff"))
    with grpc.insecure_channel(forwarding.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stub.ModelInfer(request, metadata=metadata)
        assert seen(forwarding) == {"x-team": "blue", "x-t-bin": "\ufffd"}
        assert len(list(stub.ModelStreamInfer(iter([request, request]), metadata=metadata[:1]))) == 2
        assert seen(forwarding) == {"x-team": "red"}


def test_without_a_pattern_nothing_is_forwarded(server: RunningServer, core: StubCore) -> None:
    call = Http(server.http_port)
    assert call("POST", "/v2/models/echo/infer", {"inputs": []}, {"x-team": "red"})[0] == 200
    assert seen(server) == {}
    call.connection.close()


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(InvalidArgument, match=r"--flag \(: not a regular expression"):
        ForwardedHeaders.matching("(", "--flag")


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("X-T", ["x-team", "X-Time"]),
        ("(?-i)X-T", ["X-Time"]),
        ("(?-i)x-te|X-Ti", ["x-team", "X-Time"]),
        ("(?s-i)x-te", ["x-team"]),
        ("x(?-i:-T)", ["X-Time"]),
    ],
)
def test_case_counts_when_the_pattern_says_so(pattern: str, names: list[str]) -> None:
    headers = ForwardedHeaders.matching(pattern, "--flag")
    assert list(headers.chosen(lambda: [("x-team", "red"), ("X-Time", "1"), ("y", "2")])) == names
