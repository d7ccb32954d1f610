"""Clients that break the rules of HTTP or stop in the middle: a clear answer or a closed connection, never a hang, and
everybody else is served meanwhile."""

from __future__ import annotations

import json
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from llmserve.frontends.http import bodies as http_body
from llmserve.wire.http1 import deadlines
from llmserve.wire.http1.parser import MAX_HEADER_BYTES
from llmserve.wire.listener import claim_port
from tests.frontends.grpc.test_inference_service import typed
from tests.frontends.http.test_inference_api import Http
from tests.frontends.server import HOST, RunningServer, wait_until
from tests.frontends.stub_core import StubCore

BODY = b'{"inputs":[{"name":"X","datatype":"FP32","shape":[2],"data":[1,2]}]}'
PATH = b"/v2/models/floats/infer"


@pytest.fixture
def port(server: RunningServer, core: StubCore) -> Iterator[int]:
    """The HTTP port, which answers before and after."""
    yield server.http_port
    call = Http(server.http_port)
    assert call("POST", PATH.decode(), BODY)[0] == 200
    call.connection.close()
    wait_until(lambda: core.running == 0)


def post(headers: bytes, body: bytes = b"") -> bytes:
    return b"POST " + PATH + b" HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n\r\n" + body


def answer_to(port: int, *pieces: bytes, then: str = "wait", quiet_s: float = 0.3) -> bytes:
    """All that the server sends until it closes the connection, or is silent for a moment. `then`: what follows."""
    with closing(socket.create_connection((HOST, port), timeout=10)) as connection:
        for piece in pieces:
            connection.sendall(piece)
        if then == "half-close":
            connection.shutdown(socket.SHUT_WR)
        if then == "vanish":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            return b""
        received = b""
        connection.settimeout(5)
        try:
            while chunk := connection.recv(65536):
                received += chunk
                connection.settimeout(quiet_s)
        except TimeoutError:
            pass
        return received


def status_and_error(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x00\xff\x16\x03\x01 nonsense\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /v2 HTTP/9.9\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nno colon here\r\n\r\n",
        post(b"Content-Length: -5"),
        post(b"Content-Length: 12abc"),
        post(b"Content-Length: 99999999999999999999999"),
        post(b"Content-Length: 5\r\nContent-Length: 6", b"12345"),
        post(b"Content-Length: 5\r\nTransfer-Encoding: chunked", b"0\r\n\r\n"),
        post(b"Transfer-Encoding: chunked", b"zz\r\nxx\r\n0\r\n\r\n"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\r\n\r\n\r\n\x00",
    ],
)
def test_what_is_no_http_is_answered_and_closed(port: int, request_bytes: bytes) -> None:
    status, error = status_and_error(answer_to(port, request_bytes))
    assert (status, bool(error)) == (400, True)


def test_content_length_above_the_body(port: int, core: StubCore) -> None:
    """The rest never comes: the client closes its half, or goes."""
    long = post(b"Content-Length: 1000", BODY)
    assert answer_to(port, long, then="half-close") == b""
    answer_to(port, long, then="vanish")
    assert core.requests == []


def test_content_length_below_the_body(port: int) -> None:
    """What is left over is no request."""
    assert status_and_error(answer_to(port, post(b"Content-Length: 10", BODY)))[0] == 400
    call = Http(port)
    assert call.error("POST", PATH.decode(), BODY[:10])[0] == 500
    call.connection.close()


@pytest.mark.parametrize(
    ("header", "tail", "status", "words"),
    [
        ("9999", b"12345678", 400, "inference header size should be in range"),
        ("-1", b"12345678", 400, "inference header size should be in range"),
        ("JSON", b"1234567", 400, "unexpected size for input 'X', expecting 1 additional bytes for model 'floats'"),
        ("JSON", b"123456789", 400, "unexpected additional input data for model 'floats'"),
        ("JSON-1", b"12345678", 500, "failed to parse the request JSON buffer"),
        ("99999999999999999999", b"12345678", 400, "inference header size should be in range"),
    ],
)
def test_wrong_header_lengths_and_truncated_tensors(
    server: RunningServer, port: int, header: str, tail: bytes, status: int, words: str
) -> None:
    document = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}]}
    text = json.dumps(document).encode()
    length = header.replace("JSON-1", str(len(text) - 1)).replace("JSON", str(len(text)))
    call = Http(server.http_port)
    found, error = call.error("POST", PATH.decode(), text + tail, {"Inference-Header-Content-Length": length})
    assert (found, words in error) == (status, True), error
    call.connection.close()


@pytest.mark.parametrize("where", ["line", "one header", "many headers"])
def test_endless_headers_are_cut_off(port: int, where: str) -> None:
    with closing(socket.create_connection((HOST, port), timeout=10)) as connection:
        connection.sendall(b"GET /" if where == "line" else b"GET /v2 HTTP/1.1\r\nHost: x\r\n")
        piece = b"x: y\r\n" * 1000 if where == "many headers" else b"x" * 6000
        sent = 0
        with suppress(OSError):
            while sent < 100 * MAX_HEADER_BYTES:
                connection.sendall(piece)
                sent += len(piece)
                time.sleep(0.001)
        assert sent < 50 * MAX_HEADER_BYTES


def test_headers_over_the_limit_are_answered(port: int) -> None:
    answer = answer_to(port, b"GET /v2 HTTP/1.1\r\nx: ", b"y" * MAX_HEADER_BYTES)
    assert status_and_error(answer) == (431, f"request headers exceed {MAX_HEADER_BYTES} bytes")
    large = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nx: " + b"y" * (MAX_HEADER_BYTES // 2) + b"\r\n\r\n"
    assert answer_to(port, large).startswith(b"HTTP/1.1 200")


def test_clients_that_stop_in_the_middle_are_let_go(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "HEADERS_TIMEOUT_S", 0.5)
    monkeypatch.setattr(http_body, "BODY_PAUSE_S", 0.5)
    assert answer_to(port) == b""  # says nothing at all
    status, error = status_and_error(answer_to(port, b"GET /v2 HTTP/1.1\r\nHost:"))
    assert (status, error) == (408, "request headers took more than 0.5 seconds")
    status, error = status_and_error(answer_to(port, post(b"Content-Length: 100", BODY[:20])))
    assert (status, error) == (408, "the request body stopped arriving: no data for 0.5 seconds")
    first = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = answer_to(port, first, b"GET /v2 HTTP/1.1\r\n", quiet_s=2)  # the second request of a connection
    assert [answer.count(status) for status in (b" 200 OK", b" 408 ")] == [1, 1]


def test_a_slow_client_is_served(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slower than the longest pause altogether, but never pausing that long."""
    monkeypatch.setattr(deadlines, "HEADERS_TIMEOUT_S", 5)
    monkeypatch.setattr(http_body, "BODY_PAUSE_S", 0.5)
    with closing(socket.create_connection((HOST, port), timeout=10)) as connection:
        connection.sendall(post(b"Content-Length: %d" % len(BODY)))
        for start in range(0, len(BODY), 10):
            time.sleep(0.1)
            connection.sendall(BODY[start : start + 10])
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_many_half_open_connections_hold_up_nobody(server: RunningServer, port: int) -> None:
    connections = [socket.create_connection((HOST, server.http_port), timeout=10) for _ in range(100)]
    connections += [socket.create_connection((HOST, server.grpc_port), timeout=10) for _ in range(100)]
    for number, connection in enumerate(connections[:100]):
        connection.sendall((b"", b"POST /v2", post(b"Content-Length: 100", b"{"))[number % 3])
    for number, connection in enumerate(connections[100:]):
        connection.sendall((b"", b"PRI * HTTP/2.0\r\n", PREFACE + frame(4, 0, 0, b""))[number % 3])
    call = Http(server.http_port)
    start = time.monotonic()
    assert call("POST", PATH.decode(), BODY)[0] == 200
    assert rpc_works(server)
    assert time.monotonic() - start < 30
    call.connection.close()
    for connection in connections:
        connection.close()


def test_pipelined_requests_are_answered_in_order(port: int) -> None:
    good = post(b"Content-Length: %d" % len(BODY), BODY)
    answer = answer_to(port, good * 3 + b"GET /nope HTTP/1.1\r\nHost: x\r\n\r\n", quiet_s=1)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200"] * 3 + [b"404"]


def test_sockets_notice_peers_that_are_gone() -> None:
    with closing(claim_port(HOST, 0, "--http-port")) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        with client, accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, DATA, SETTINGS, END_HEADERS, END_STREAM = 1, 0, 4, 4, 1


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def rpc_headers(path: bytes) -> bytes:
    """Literal header fields without indexing (RFC 7541, 6.2.2)."""
    fields = [
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x"), (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]  # fmt: skip
    block = b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in fields)
    return frame(HEADERS, END_HEADERS, 1, block)


def rpc_works(server: RunningServer) -> bool:
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = service_pb2.ModelInferRequest(
            model_name="floats", inputs=[typed("X", "FP32", [2], fp32_contents=[1, 2])]
        )
        return len(stub.ModelInfer(request, timeout=10).raw_output_contents[0]) == 8


INFER = b"/inference.GRPCInferenceService/ModelInfer"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (frame(DATA, 0, 1, b"\0" + struct.pack(">I", 2**32 - 1)), b"8"),  # a message of 4 GiB is announced
        (frame(DATA, END_STREAM, 1, b"\0" + struct.pack(">I", 100) + b"short"), None),  # and not all of it sent
        (frame(DATA, END_STREAM, 1, b"\0" + struct.pack(">I", 4) + b"\xff\xff\xff\xff"), None),  # no message at all
        (frame(DATA, END_STREAM, 1, b"\7" + struct.pack(">I", 0)), None),  # an unknown compression
        (frame(DATA, END_STREAM, 1, b""), None),
        (frame(99, 255, 1, b"?"), None),
        (frame(DATA, 0, 0, b"data of no stream"), None),
        (b"\xff" * 100, None),
    ],
)
def test_broken_calls_over_grpc(server: RunningServer, core: StubCore, data: bytes, status: bytes | None) -> None:
    with closing(socket.create_connection((HOST, server.grpc_port), timeout=10)) as connection:
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + rpc_headers(INFER) + data)
        connection.settimeout(0.3 if status is None else 5)
        received = b""
        with suppress(TimeoutError, ConnectionResetError):
            while b"grpc-status" not in received and (chunk := connection.recv(65536)):
                received += chunk
    if status is not None:
        assert b"grpc-status" in received
        assert received.split(b"grpc-status")[1][1:2] == status  # RESOURCE_EXHAUSTED
    assert core.requests == []
    assert rpc_works(server)


def test_a_call_that_is_never_finished_is_no_request(server: RunningServer, core: StubCore) -> None:
    connection = socket.create_connection((HOST, server.grpc_port), timeout=10)
    connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + rpc_headers(INFER) + frame(DATA, 0, 1, b"\0\0\0"))
    assert rpc_works(server)
    connection.close()
    assert len(core.requests) == 1
    wait_until(lambda: core.running == 0)


def test_truncated_tensors_over_grpc(server: RunningServer, core: StubCore) -> None:
    def refusal(*raw: bytes, **fields: Any) -> str:
        tensor = {"name": "X", "datatype": "FP32", "shape": [2]} | fields
        request = service_pb2.ModelInferRequest(model_name="floats", raw_input_contents=raw, inputs=[tensor])
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request, timeout=10)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        return str(caught.value.details())

    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert "Expected 8, got 7" in refusal(b"1234567")
        assert "Expected 8, got 9" in refusal(b"123456789")
        assert "Expected 8, got 0" in refusal(b"")
        assert "unable to find data" in refusal()
        assert "incomplete string length" in refusal(b"\1\0\0", datatype="BYTES", shape=[1])
        assert "incomplete string data" in refusal(b"\5\0\0\0abc", datatype="BYTES", shape=[1])
        assert "it has too many elements" in refusal(b"", shape=[2**62, 2**62])
    assert rpc_works(server)
