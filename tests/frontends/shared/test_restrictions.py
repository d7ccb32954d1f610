"""Groups of calls that need a key, over both protocols, as the real server restricts them; and web pages."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from llmserve.errors import InvalidArgument
from llmserve.frontends.grpc.health import health_methods
from llmserve.frontends.http.inference_api import InferenceApi, triton_routes
from llmserve.frontends.shared.extension_state import Extensions
from llmserve.frontends.shared.forwarded_headers import ForwardedHeaders
from llmserve.frontends.shared.restrictions import (
    API_OF_PATH,
    API_OF_RPC,
    CALLS,
    GRPC_PREFIX,
    Api,
    Restrictions,
    parse_restrictions,
)
from llmserve.frontends.text.routes import PATHS as OPENAI_PATHS
from tests.frontends.server import HOST, RunningServer, running_server
from tests.frontends.stub_core import StubCore

SECRET = "s3cret=x"
RPCS = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
ROUTES = [(method, path) for method, path, _ in triton_routes(InferenceApi(StubCore(), Extensions(), 1))]


def restricted(*apis: Api) -> tuple[Restrictions, Restrictions]:
    """Each behind a key of its own."""
    options = [f"{api}:Key-{api}={SECRET}" for api in apis]
    return (
        parse_restrictions(options, "--flag", kind="api"),
        parse_restrictions(options, "--flag", kind="protocol", prefix=GRPC_PREFIX),
    )


def grpc_key(api: Api, value: str = SECRET) -> dict[str, str]:
    return {f"{GRPC_PREFIX}key-{api}": value}


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    """Everything is restricted."""
    with running_server(StubCore, restrictions=restricted(*Api)) as running:
        yield running


def ask(server: RunningServer, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(HOST, server.http_port, timeout=20)
    try:
        connection.request(method, path, None, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def filled(path: str) -> str:
    return path.format(
        model="echo",
        version="1",
        region="r",
        repository="x",
        owner="o",
        name="n",
        response_id="r",
        file_id="f",
        batch_id="b",
    )


def test_every_call_belongs_to_exactly_one_group() -> None:
    paths = [path for calls in CALLS.values() for path in calls.paths]
    rpcs = [rpc for calls in CALLS.values() for rpc in calls.rpcs]
    assert sorted(paths) == sorted({path for _, path in (*ROUTES, *OPENAI_PATHS)})
    health = [path.rpartition("/")[2] for path in health_methods(StubCore())]
    assert sorted(rpcs) == sorted([*(rpc.name for rpc in RPCS), *health])
    assert CALLS.keys() == set(Api)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_http_wants_the_key_of_the_group(locked: RunningServer, method: str, path: str) -> None:
    header = f"Key-{API_OF_PATH[path]}"
    refusal = b'{"error":"This API is restricted, expecting header \'%b\'"}' % header.encode()
    for headers in ({}, {header: "wrong"}, {header: SECRET[:-1]}, {header: SECRET + "x"}, {header: ""}):
        assert ask(locked, method, filled(path), headers) == (403, refusal)
    assert ask(locked, "DELETE", filled(path), {}) == (403, refusal)
    assert ask(locked, method, filled(path), {header.upper(): SECRET})[0] != 403
    assert ask(locked, "DELETE", filled(path), {header: SECRET})[0] == 405


@pytest.mark.parametrize(("method", "path"), OPENAI_PATHS)
def test_openais_api_wants_the_key_of_the_group(locked: RunningServer, method: str, path: str) -> None:
    header = f"Key-{API_OF_PATH[path]}"
    for headers in ({}, {header: "wrong"}):
        status, body = ask(locked, method, filled(path), headers)
        error = json.loads(body)["error"]
        said = error["message"] if isinstance(error, dict) else error
        assert (status, said) == (403, f"This API is restricted, expecting header '{header}'")
    assert ask(locked, "PATCH", filled(path), {})[0] == 403
    assert ask(locked, method, filled(path), {header: SECRET})[0] != 403
    assert ask(locked, "PATCH", filled(path), {header: SECRET})[0] == 405


def test_what_is_no_call_is_not_found_rather_than_restricted(locked: RunningServer) -> None:
    assert ask(locked, "GET", "/v2/nothing", {})[0] == 404


@pytest.mark.parametrize("name", [rpc.name for rpc in RPCS])
def test_grpc_wants_the_key_of_the_group(locked: RunningServer, name: str) -> None:
    api = API_OF_RPC[name]
    rpc = RPCS[[each.name for each in RPCS].index(name)]
    request = GetMessageClass(rpc.input_type)()

    def call(*metadata: tuple[str, str]) -> tuple[str, str]:
        with grpc.insecure_channel(locked.grpc) as channel:
            method = getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), name)
            try:
                if rpc.client_streaming:
                    list(method(iter([request]), metadata=metadata, timeout=20))
                else:
                    method(request, metadata=metadata, timeout=20)
            except grpc.RpcError as error:
                return error.code().name, error.details()
        return "OK", ""

    header = f"{GRPC_PREFIX}key-{api}"
    refusal = "UNAVAILABLE", f"This protocol is restricted, expecting header '{GRPC_PREFIX}Key-{api}'"
    assert call() == refusal
    assert call((header, "wrong")) == refusal
    assert call((header, "wrong"), (header, SECRET)) == refusal
    assert call((f"key-{api}", SECRET)) == refusal
    assert "restricted" not in call((header, SECRET))[1]
    assert "restricted" not in call((header, SECRET), (header, "wrong"))[1]


def test_the_standard_health_service_is_of_the_health_group(locked: RunningServer) -> None:
    with grpc.insecure_channel(locked.grpc) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        with pytest.raises(grpc.RpcError, match="This protocol is restricted"):
            check(b"", timeout=20)
        assert check(b"", timeout=20, metadata=tuple(grpc_key(Api.HEALTH).items())) == b"\x08\x01"


def test_tritonclients_with_headers() -> None:
    """A key for inference and another for the repository; the rest is open."""
    x = np.ones((1, 2), np.float32)
    with running_server(StubCore, restrictions=restricted(Api.INFERENCE, Api.MODEL_REPOSITORY)) as server:
        for module, url, prefix in (
            (triton_http, server.http, ""),
            (triton_grpc, server.grpc, GRPC_PREFIX),
        ):
            inputs = [module.InferInput(name, [1, 2], "FP32") for name in ("INPUT0", "INPUT1")]
            for each in inputs:
                each.set_data_from_numpy(x)
            with module.InferenceServerClient(url) as client:
                assert client.is_server_ready()
                assert client.get_model_metadata("add_two")
                with pytest.raises(InferenceServerException, match="restricted"):
                    client.infer("add_two", inputs)
                with pytest.raises(InferenceServerException, match="restricted"):
                    client.load_model("add_two", headers={f"{prefix}key-inference": SECRET})
                result = client.infer("add_two", inputs, headers={f"{prefix}key-inference": SECRET})
                assert result.as_numpy("OUTPUT0").tolist() == [[2, 2]]
                client.load_model("add_two", headers={f"{prefix}key-model-repository": SECRET})


def test_streams_of_a_client_with_and_without_the_key() -> None:
    n = triton_grpc.InferInput("N", [1, 1], "INT32")
    n.set_data_from_numpy(np.array([[2]], np.int32))

    def answers(server: RunningServer, headers: dict[str, str]) -> list[str]:
        seen: list[str] = []
        with triton_grpc.InferenceServerClient(server.grpc) as client:
            client.start_stream(lambda result, error: seen.append(str(error or "OK")), headers=headers)
            with contextlib.suppress(InferenceServerException):  # the client may have been told already
                client.async_stream_infer("count", [n])
            client.stop_stream()
        return seen

    with running_server(StubCore, restrictions=restricted(Api.INFERENCE)) as server:
        assert answers(server, grpc_key(Api.INFERENCE)) == ["OK", "OK"]
        (refusal,) = answers(server, grpc_key(Api.INFERENCE, "wrong"))
        assert "This protocol is restricted" in refusal


def test_a_body_is_not_awaited_when_its_request_is_refused(locked: RunningServer) -> None:
    head = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 500000\r\n\r\n"
    with socket.create_connection((HOST, locked.http_port), timeout=20) as client:
        client.sendall(head)
        assert client.recv(4096).startswith(b"HTTP/1.1 403 ")


def test_keys_are_not_forwarded_to_models() -> None:
    core = StubCore()
    restrictions = http, rpc = restricted(Api.INFERENCE)
    headers = ForwardedHeaders.matching("key|team", "--flag", http.headers() | rpc.headers())
    with running_server(lambda: core, headers=headers, restrictions=restrictions) as server:
        with triton_http.InferenceServerClient(server.http) as client:
            client.infer("echo", [], headers={"KEY-Inference": SECRET, "X-Team": "red"})
        with triton_grpc.InferenceServerClient(server.grpc) as client:
            client.infer("echo", [], headers={**grpc_key(Api.INFERENCE), "x-team": "red"})
    assert [dict(request.parameters) for request in core.requests] == [{"x-team": "red"}] * 2


@pytest.mark.parametrize("path", ["/v2/repository/models/m/load", "/v2/systemsharedmemory/region/r/register"])
def test_a_web_page_can_neither_load_models_nor_reach_memory(server: RunningServer, core: StubCore, path: str) -> None:
    status, body = ask(server, "POST", path, {"Origin": "http://127.0.0.1:8000", "Content-Type": "text/plain"})
    assert (status, b"refuses web pages" in body) == (403, True)
    assert core.loaded == {}
    assert ask(server, "POST", path, {})[0] != 403
    assert ask(server, "GET", "/v2/health/live", {"Origin": "http://127.0.0.1:8000"}) == (200, b"")


def test_a_web_page_with_the_key_may() -> None:
    with running_server(StubCore, restrictions=restricted(Api.MODEL_REPOSITORY)) as server:
        headers = {"Origin": "http://console", "Key-model-repository": SECRET}
        assert ask(server, "POST", "/v2/repository/models/m/load", headers)[0] == 200


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["bogus:k=v"], "unknown restricted api 'bogus'"),
        (["health,:k=v"], "unknown restricted api ''"),
        (["Health:k=v"], "unknown restricted api 'Health'"),
        (["health,metadata"], "option format is"),
        (["health:k"], "option format is"),
        (["health:k="], "option format is"),
        ([":k=v"], "option format is"),
        (["health:=v"], "option format is"),
        (["health:k=v", "metadata,health:j=w"], "restricted api 'health' can not be specified in multiple config"),
        (["health,health:k=v"], "restricted api 'health' can not be specified in multiple config groups"),
        (["health: k=v"], "' k' is not the name of a header"),
        (["health:k= v"], "the value of 'k' is not valid in a header"),
        (["health:k=v\n"], "the value of 'k' is not valid in a header"),
        (["health:k=ä"], "the value of 'k' is not valid in a header"),
        (["a:k=v", "b:k=v"], "(2 problems)"),
    ],
)
def test_options_that_cannot_be_read(options: list[str], words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_restrictions(options, "--http-restricted-api", kind="api")
    assert words in str(caught.value)
    assert str(caught.value).startswith("--http-restricted-api")


def test_values_are_in_no_text() -> None:
    made = parse_restrictions([f"health,trace:Admin-Key={SECRET}"], "--flag", kind="api")
    assert made.keys.keys() == {Api.HEALTH, Api.TRACE}
    assert made.headers() == {"admin-key"}
    assert SECRET not in repr(made)
    with pytest.raises(InvalidArgument) as caught:
        parse_restrictions([f"health:{SECRET}", f":k={SECRET}", f"x:k={SECRET}"], "--flag", kind="api")
    assert SECRET not in str(caught.value)
