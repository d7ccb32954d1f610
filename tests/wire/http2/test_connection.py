"""Frames as a client sends them, good and bad; and long, large and many calls of a real one."""

from __future__ import annotations

import gzip
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from llmserve.wire.http2 import frames, sender
from llmserve.wire.http2.call import WINDOW
from llmserve.wire.http2.frames import frame
from llmserve.wire.http2.messages import framed
from tests.frontends.server import RunningServer, wait_until
from tests.frontends.stub_core import StubCore
from tests.wire.http2.raw_client import RawClient

READY = service_pb2.ServerReadyRequest().SerializeToString()
OK = {"grpc-status": "0"}
MIB = 1024 * 1024


def echo_message(data: bytes) -> Any:
    message = service_pb2.ModelInferRequest(model_name="echo", raw_input_contents=[data])
    message.inputs.add(name="X", datatype="UINT8", shape=[len(data)])
    return message


@pytest.fixture
def client(server: RunningServer) -> Iterator[RawClient]:
    made = RawClient(server.grpc_port)
    yield made
    made.socket.close()


@pytest.fixture
def stub(server: RunningServer) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(server.grpc, options=options) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def still_works(server: RunningServer) -> bool:
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return bool(stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=10).live)


def send_for(client: RawClient, data: bytes, *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        client.send(data)


def test_a_call_by_hand(client: RawClient) -> None:
    client.call(1, "ServerReady", READY)
    assert client.until(frames.DATA, 1) == framed(service_pb2.ServerReadyResponse(ready=True).SerializeToString())
    assert client.status(1) == OK


def test_heads_are_remembered_only_while_the_table_stays_the_same(client: RawClient) -> None:
    """The same bytes mean another path once the client has put another one into the table."""
    for stream, method in ((1, "ServerReady"), (3, "ServerReady"), (5, "ServerLive"), (7, "ServerReady"), (9, "Nope")):
        client.call(stream, method, READY, x_id="a" if stream < 7 else f"b{stream}")
        unknown = {"grpc-status": "12", "grpc-message": "Method not found!"}
        assert client.status(stream) == (unknown if method == "Nope" else OK)


def test_pings_and_settings_are_answered(client: RawClient) -> None:
    client.send(frame(frames.PING, 0, 0, b"12345678"))
    assert client.until(frames.PING) == b"12345678"
    client.send(frames.settings({frames.MAX_FRAME_SIZE: 20_000}))
    assert client.until(frames.SETTINGS) == b""


def test_padding_priority_and_continuation(client: RawClient) -> None:
    block = client.headers("ServerReady")
    first = b"\x03" + bytes(5) + block[:7] + b"\0\0\0"
    client.send(frame(frames.HEADERS, frames.PADDED | frames.HAS_PRIORITY, 1, first))
    client.send(
        frame(frames.CONTINUATION, 0, 1, block[7:9]) + frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[9:])
    )
    message = framed(READY)
    client.send(frame(frames.DATA, frames.PADDED, 1, b"\x02" + message[:2] + b"\0\0"))
    client.send(frame(frames.PRIORITY, 0, 1, bytes(5)) + frame(0x7F, 0, 0, b"unknown kinds are ignored"))
    client.send(frame(frames.DATA, frames.END_STREAM, 1, message[2:]))
    assert client.status(1) == OK


def test_a_client_of_another_protocol(server: RunningServer) -> None:
    client = RawClient(server.grpc_port, preface=b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert client.goaway() == frames.PROTOCOL_ERROR
    client.socket.close()


def test_a_timeout_that_is_none(client: RawClient) -> None:
    """It ends its call only: the connection may be a proxy's, with other clients' calls on it."""
    client.call(1, "ServerReady", READY, grpc_timeout="soon")
    assert client.status(1) == {"grpc-status": "13", "grpc-message": "grpc-timeout is not valid: 'soon'"}
    client.call(3, "ServerReady", READY)
    assert client.status(3) == OK


def test_requests_that_are_not_grpc(client: RawClient) -> None:
    client.send(
        frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, client.headers("", **{":method": "GET"}))
    )
    assert client.status(1) == {":status": "415"}
    client.call(3, "ServerReady", READY, content_type="application/grpc-web")
    assert client.status(3) == {":status": "415"}
    client.call(5, "ServerReady", READY, content_type="application/grpc+proto")
    assert client.status(5) == OK


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", "13"),  # no message
        (framed(READY) * 2, "13"),
        (framed(b"\xff\xff"), "13"),  # no protobuf
        (framed(b"xxx")[:-1], "13"),  # cut off
        (b"\x01\0\0\0\x01x", "13"),  # compressed, nobody knows how
        (b"\x02\0\0\0\x01x", "13"),
        (b"\0\xff\xff\xff\xff", "8"),
    ],
)
def test_calls_with_bad_messages(client: RawClient, data: bytes, status: str) -> None:
    client.send(frame(frames.HEADERS, frames.END_HEADERS, 1, client.headers("ServerReady")))
    client.send(frame(frames.DATA, frames.END_STREAM, 1, data))
    assert client.status(1)["grpc-status"] == status
    client.call(3, "ServerReady", READY)
    assert client.status(3) == OK


@pytest.mark.parametrize(("encoding", "status"), [("gzip", "13"), ("deflate", "13"), ("br", "12")])
def test_messages_that_cannot_be_decompressed(client: RawClient, encoding: str, status: str) -> None:
    client.send(frame(frames.HEADERS, frames.END_HEADERS, 1, client.headers("ServerReady", grpc_encoding=encoding)))
    client.send(frame(frames.DATA, frames.END_STREAM, 1, b"\x01\0\0\0\x03xyz"))
    assert client.status(1)["grpc-status"] == status


def test_a_bad_message_in_a_stream(client: RawClient) -> None:
    client.send(frame(frames.HEADERS, frames.END_HEADERS, 1, client.headers("ModelStreamInfer")))
    client.send(frame(frames.DATA, 0, 1, framed(b"\xff\xff")))
    fields = client.status(1)
    assert fields["grpc-status"] == "13"
    assert "is not valid" in fields["grpc-message"]
    assert client.until(frames.RST_STREAM, 1) == frames.WORD.pack(frames.NO_ERROR)
    client.send(frame(frames.DATA, frames.END_STREAM, 1, b"what was on its way"))
    client.call(3, "ServerReady", READY)
    assert client.status(3) == OK


def test_a_stream_that_ends_within_a_message(client: RawClient) -> None:
    client.send(frame(frames.HEADERS, frames.END_HEADERS, 1, client.headers("ModelStreamInfer")))
    client.send(frame(frames.DATA, frames.END_STREAM, 1, framed(bytes(100))[:20]))
    fields = client.status(1)
    assert (fields["grpc-status"], fields["grpc-message"]) == ("13", "the last message is truncated")


def test_a_stream_ends_with_the_status_of_its_bad_message(client: RawClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmserve.wire.http2.messages.MAX_MESSAGE_BYTES", 10**6)
    data = gzip.compress(bytes(10**7))
    client.send(frame(frames.HEADERS, frames.END_HEADERS, 1, client.headers("ModelStreamInfer", grpc_encoding="gzip")))
    client.send(frame(frames.DATA, 0, 1, b"\x01" + struct.pack(">I", len(data)) + data))
    assert client.status(1)["grpc-status"] == "8"


def test_answers_wait_for_the_windows(client: RawClient) -> None:
    """A client that gives a few bytes at a time gets a long answer in pieces, and others are not held up."""
    client.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 10}))
    client.call(1, "ModelInfer", echo_message(bytes(100)).SerializeToString())
    received = client.until(frames.DATA, 1)
    assert len(received) == 10
    client.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 15}))  # of open calls, too
    received += client.until(frames.DATA, 1)
    assert len(received) == 15
    client.call(3, "ServerReady", READY)
    assert client.status(3) == OK
    client.send(frames.window_update(1, 1000))
    received += client.until(frames.DATA, 1)
    assert client.status(1) == OK
    assert service_pb2.ModelInferResponse.FromString(received[5:]).raw_output_contents == [bytes(100)]


def test_an_answer_that_nobody_takes_ends(client: RawClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives its memory back."""
    monkeypatch.setattr(sender, "UNREAD_TIMEOUT_S", 0.2)
    client.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))
    client.call(1, "ModelInfer", echo_message(bytes(100)).SerializeToString())
    fields = client.status(1)
    assert fields["grpc-status"] == "4"
    assert "the client has read nothing of the response" in fields["grpc-message"]


def test_a_waiting_answer_that_is_not_wanted_any_more(client: RawClient, core: StubCore) -> None:
    client.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 10}))
    client.call(1, "ModelInfer", echo_message(bytes(100)).SerializeToString())
    client.until(frames.DATA, 1)
    client.send(frames.reset(1, 8))
    client.send(frames.settings({frames.INITIAL_WINDOW_SIZE: frames.DEFAULT_WINDOW}))
    client.call(3, "ServerReady", READY)
    assert client.status(3) == OK
    wait_until(lambda: core.running == 0)


def test_requests_that_are_not_read_close_the_window(client: RawClient, core: StubCore) -> None:
    """One call takes so many requests at a time; more than that and a window full of them is too much."""
    core.slow_s = 30
    request = framed(service_pb2.ModelInferRequest(model_name="slow", id="x" * 20_000).SerializeToString())
    client.send(frame(frames.HEADERS, frames.END_HEADERS, 1, client.headers("ModelStreamInfer")))
    with suppress(ConnectionError):
        for _ in range(1024 + 2 * WINDOW // len(request)):
            client.send(frame(frames.DATA, 0, 1, request))
    with pytest.raises((EOFError, ConnectionError)):
        client.until(frames.RST_STREAM, 1)
    wait_until(lambda: core.running == 0)


def test_unread_answers_to_pings_have_an_end(server: RunningServer) -> None:
    client = RawClient(server.grpc_port)
    client.socket.settimeout(1)
    pings = frame(frames.PING, 0, 0, bytes(8)) * 20_000
    with pytest.raises((ConnectionError, TimeoutError)):
        send_for(client, pings, seconds=20)
    client.socket.close()
    assert still_works(server)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_requests(stub: service_pb2_grpc.GRPCInferenceServiceStub, compression: grpc.Compression) -> None:
    for data in (bytes(50_000), bytes(3_000_000), np.random.default_rng(1).bytes(3_000_000)):
        assert stub.ModelInfer(echo_message(data), compression=compression).raw_output_contents == [data]


def test_messages_larger_than_the_windows_of_both_directions(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    data = np.random.default_rng(1).bytes(3 * WINDOW)
    assert stub.ModelInfer(echo_message(data)).raw_output_contents == [data]


def test_many_calls_at_the_same_time(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    calls = [stub.ModelInfer.future(echo_message(bytes(n))) for n in range(1, 400)]
    assert [len(call.result(timeout=30).raw_output_contents[0]) for call in calls] == list(range(1, 400))


def test_a_connection_that_is_lost_cancels_its_calls(server: RunningServer, core: StubCore) -> None:
    client = RawClient(server.grpc_port)
    core.slow_s = 30
    client.call(1, "ModelInfer", service_pb2.ModelInferRequest(model_name="slow").SerializeToString())
    wait_until(lambda: core.running == 1)
    client.socket.close()
    wait_until(lambda: core.running == 0)
