"""The id that a client gives its request, or is given, comes back with every answer."""

from __future__ import annotations

import re
from collections.abc import Iterator

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.frontends.http.test_inference_api import ADD_TWO, Http
from tests.frontends.server import RunningServer
from tests.frontends.stub_core import StubCore

GIVEN = "job-17/part:3+A.b_c@d="
MADE = re.compile(r"req_[0-9a-f]{24}")


@pytest.fixture
def call(server: RunningServer, core: StubCore) -> Iterator[Http]:
    made = Http(server.http_port)
    yield made
    made.connection.close()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2/health/live"),
        ("GET", "/v2/models/nope"),
        ("POST", ADD_TWO),
        ("GET", "/nowhere"),
        ("DELETE", "/v2"),
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/nowhere"),
    ],
)
def test_whatever_the_answer_is(call: Http, method: str, path: str) -> None:
    call(method, path, headers={"X-Request-Id": GIVEN})
    assert call.response.headers.get_all("x-request-id") == [GIVEN]


@pytest.mark.parametrize("given", ["", "x" * 129, "two words", "a\tb", "ä", '"', "{}", "a,b"])
def test_what_is_no_id_is_not_repeated(call: Http, given: str) -> None:
    call("GET", "/v2", headers={"x-request-id": given})
    assert "x-request-id" not in call.response.headers
    call("GET", "/v1/models", headers={"x-request-id": given})
    assert MADE.fullmatch(call.response.headers["x-request-id"])


def test_the_longest_id(call: Http) -> None:
    call("GET", "/v2", headers={"x-request-id": "x" * 128})
    assert call.response.headers["x-request-id"] == "x" * 128


def test_openais_paths_make_ids_and_anthropics_have_them_by_its_name(call: Http) -> None:
    made = set()
    for path in ("/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/nothing"):
        call("POST", path, {})
        made.add(call.response.headers["x-request-id"])
        expected = call.response.headers["x-request-id"] if path.startswith("/v1/messages") else None
        assert call.response.headers.get("request-id") == expected
    assert len(made) == 4
    assert all(MADE.fullmatch(each) for each in made)


def metadata_of(call: grpc.Call) -> dict[str, str]:
    return {key: value for key, value in call.initial_metadata() if key == "x-request-id"}


def test_grpc(server: RunningServer, core: StubCore) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for metadata, expected in (
            ((("x-request-id", GIVEN),), {"x-request-id": GIVEN}),
            ((("x-request-id", "two words"),), {}),
            ((), {}),
        ):
            _, unary = stub.ServerLive.with_call(service_pb2.ServerLiveRequest(), metadata=metadata)
            assert metadata_of(unary) == expected
            stream = stub.ModelStreamInfer(iter([service_pb2.ModelInferRequest(model_name="nope")]), metadata=metadata)
            assert len(list(stream)) == 1
            assert metadata_of(stream) == expected
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfer(service_pb2.ModelInferRequest(model_name="nope"), metadata=metadata)
            assert metadata_of(caught.value) == expected
