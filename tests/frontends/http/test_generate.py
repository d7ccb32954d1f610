"""`generate` and `generate_stream`: flat JSON in, flat JSON or server-sent events out."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.frontends.http.test_inference_api import Http
from tests.frontends.server import HOST, RunningServer, settled, wait_until
from tests.frontends.stub_core import StubCore


@pytest.fixture
def call(server: RunningServer, core: StubCore) -> Iterator[Http]:
    made = Http(server.http_port)
    yield made
    made.connection.close()


def events(body: bytes) -> list[dict[str, Any]]:
    *parts, rest = body.decode().split("\n\n")
    assert rest == ""
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_keys_become_tensors_or_parameters(call: Http, core: StubCore) -> None:
    body = {"id": "g", "TEXT": "hi", "temperature": 0.5, "flag": True, "parameters": {"depth": 3}}
    status, answer = call("POST", "/v2/models/echo/generate", body)
    parameters = {"temperature": 0.5, "flag": True, "depth": 3}
    expected = {"model_name": "echo", "model_version": "1", "id": "g", "TEXT": "hi"} | parameters
    assert (status, json.loads(answer)) == (200, expected)
    request = core.requests[0]
    assert request.inputs["TEXT"].data.tolist() == [b"hi"]
    assert request.parameters == parameters


def test_scalars_and_lists_of_a_batching_model(call: Http, core: StubCore) -> None:
    _, answer = call("POST", "/v2/models/add_two/generate", {"INPUT0": 1, "INPUT1": [2.5]})
    assert core.requests[0].inputs["INPUT0"].data.tolist() == [[1.0]]
    assert json.loads(answer)["OUTPUT0"] == 3.5
    _, answer = call("POST", "/v2/models/add_two/generate", {"INPUT0": [1, 2], "INPUT1": [0.5, 1]})
    assert json.loads(answer)["OUTPUT0"] == [1.5, 3.0]


def test_generate_wants_exactly_one_response(call: Http) -> None:
    status, answer = call("POST", "/v2/models/count/generate", {"N": 1})
    assert (status, json.loads(answer)["VALUE"]) == (200, 0)
    for n in (0, 2):
        status, answer = call("POST", "/v2/models/count/generate", {"N": n})
        assert status == 200
        assert json.loads(answer)["error"].startswith("generate expects model to produce exactly 1 response")


def test_generate_stream_is_one_event_per_response(call: Http) -> None:
    status, body = call("POST", "/v2/models/count/generate_stream", {"N": 3, "id": "s"})
    assert (status, call.response.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert events(body) == [
        {"model_name": "count", "model_version": "1", "id": "s", "VALUE": value} for value in range(3)
    ]


def test_generate_stream_of_an_ordinary_model_and_an_empty_stream(call: Http) -> None:
    _, body = call("POST", "/v2/models/echo/versions/1/generate_stream", {"TEXT": ["a", "b"]})
    assert [each["TEXT"] for each in events(body)] == [["a", "b"]]
    assert call("POST", "/v2/models/count/generate_stream", {"N": 0}) == (200, b"")


@pytest.mark.parametrize("kind", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("model", "body", "status", "words"),
    [
        ("nope", {}, 404, "Request for unknown model: 'nope' is not found"),
        ("count", b"{", 500, "failed to parse the request JSON buffer"),
        ("count", [1], 500, "attempt to get members for non-object"),
        ("count", {"N": "3"}, 500, "Unable to parse 'data': attempt to access JSON non-signed-integer"),
        ("count", {"N": 1.5}, 500, "Unable to parse 'data'"),
        ("count", {"N": {"x": 1}}, 500, "non-signed-integer as signed-integer"),
        ("count", {"N": None}, 500, "non-signed-integer as signed-integer"),
        ("count", {"N": 1, "parameters": {"N": 2}}, 400, "'parameters': input 'N' already exists in request"),
        ("count", {"N": 101}, 400, "N must be at most 100"),
        ("echo", {"TEXT": 5}, 500, "non-string as string"),
        ("echo", {"foo": [1]}, 400, "parameter 'foo' has invalid type"),
        ("echo", {"foo": None}, 400, "parameter 'foo' has invalid type"),
        ("echo", {"parameters": {"b": {}}}, 400, "Converting keyword: 'parameters': parameter 'b' has invalid type"),
        ("echo", {"triton_x": 1}, 400, "reserved"),
        ("echo", {"id": 3}, 500, "Unable to parse 'id'"),
    ],
)
def test_errors_before_inference_are_json(
    call: Http, kind: str, model: str, body: Any, status: int, words: str
) -> None:
    found, text = call.error("POST", f"/v2/models/{model}/{kind}", body)
    assert (found, words in text) == (status, True), text


def test_a_model_s_error_sets_the_status_when_it_comes_first(call: Http) -> None:
    assert call("POST", "/v2/models/broken/generate_stream", {}) == (500, b'data: {"error":"boom"}\n\n')
    assert call.error("POST", "/v2/models/broken/generate", {}) == (500, "boom")


def test_a_later_error_is_an_event(call: Http) -> None:
    status, body = call("POST", "/v2/models/count/generate_stream", {"N": 9, "FAIL_AFTER": 2})
    assert status == 200
    assert [each.get("VALUE", each.get("error")) for each in events(body)] == [0, 1, "broken in the middle"]


@pytest.mark.parametrize(("model", "body"), [("count", b'{"N": -1}'), ("slow", b"{}")])
def test_a_client_that_leaves_closes_the_stream(server: RunningServer, core: StubCore, model: str, body: bytes) -> None:
    with socket.create_connection((HOST, server.http_port), timeout=10) as connection:
        head = f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_until(lambda: core.running == 1)
        if model == "count":
            assert connection.recv(10_000)
    wait_until(lambda: core.running == 0)


def test_a_client_that_does_not_read_stops_the_stream(server: RunningServer, core: StubCore, call: Http) -> None:
    """An endless stream to a client that never reads: buffers fill, then nothing more is taken from the model."""
    with socket.create_connection((HOST, server.http_port), timeout=10) as connection:
        connection.sendall(b"POST /v2/models/flood/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        stopped_at = settled(lambda: core.pulled, at_most=1000)
        status, body = call("POST", "/v2/models/count/generate_stream", {"N": 3})
        assert (status, len(events(body))) == (200, 3)  # others are served
        assert (core.pulled, core.running) == (stopped_at, 1)
        while len(connection.recv(1 << 20)) and core.pulled == stopped_at:
            pass  # reading makes room
        assert core.pulled > stopped_at
    wait_until(lambda: core.running == 0)
