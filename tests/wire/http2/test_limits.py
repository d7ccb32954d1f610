"""Bounds of HTTP/2 that hold whatever state a call is in, and however its bytes are cut into frames."""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from llmserve.wire.http2 import calls, flood_limits, frames
from llmserve.wire.http2.call import Call
from llmserve.wire.http2.flood_limits import BURST
from llmserve.wire.http2.frames import ENHANCE_YOUR_CALM, ConnectionFailed, frame
from llmserve.wire.http2.headers import MAX_BLOCK_BYTES, MAX_REMEMBERED_BYTES, HeadDecoder
from tests.frontends.server import RunningServer
from tests.wire.http2.raw_client import RawClient

END, WHOLE = frames.END_STREAM, frames.END_HEADERS


@pytest.fixture
def client(server: RunningServer) -> Iterator[RawClient]:
    made = RawClient(server.grpc_port)
    yield made
    made.socket.close()


def literal(name: bytes, value: bytes) -> bytes:
    """HPACK without a table, for texts of up to 16 KiB."""
    rest = len(value) - 127
    length = bytes((len(value),)) if rest < 0 else bytes((127, rest % 128 | 128, rest // 128))
    return b"\0" + bytes((len(name),)) + name + length + value


FILLER = b"".join(literal(b"x-%d" % number, b"y" * 8000) for number in range(1 + MAX_BLOCK_BYTES // 8000))


@pytest.mark.parametrize("num_pieces", [1, 2, 8])
@pytest.mark.parametrize("state", ["head", "trailers", "after the end"])
def test_header_blocks_have_one_limit(client: RawClient, state: str, num_pieces: int) -> None:
    block = FILLER
    if state == "head":
        block = client.headers("ServerReady") + FILLER
    elif state == "trailers":
        client.send(frame(frames.HEADERS, WHOLE, 1, client.headers("ServerReady")))
    else:
        client.call(1, "ServerReady", b"")
        client.status(1)
    size = -(-len(block) // num_pieces)
    pieces = [block[start : start + size] for start in range(0, len(block), size)]
    for number, piece in enumerate(pieces):
        flags = (END if number == 0 else 0) | (WHOLE if number == len(pieces) - 1 else 0)
        client.flood(frame(frames.HEADERS if number == 0 else frames.CONTINUATION, flags, 1, piece))
    assert client.goaway() == ENHANCE_YOUR_CALM


def test_headers_of_ended_calls_are_limited(client: RawClient) -> None:
    client.call(1, "ServerReady", b"")
    client.status(1)
    client.flood(frame(frames.HEADERS, WHOLE | END, 1, literal(b"x", b"y")) * 20_000)
    assert client.goaway() == ENHANCE_YOUR_CALM


def test_large_headers_are_limited_in_number(client: RawClient) -> None:
    block = client.headers("ServerReady") + FILLER[: 8 * 8008]
    client.flood(b"".join(frame(frames.HEADERS, WHOLE | END, stream, block) for stream in range(1, 301, 2)))
    assert client.goaway() == ENHANCE_YOUR_CALM


def resizing(*sizes: int) -> bytes:
    entries = b"".join(frames.SETTING.pack(frames.INITIAL_WINDOW_SIZE, size) for size in sizes)
    return frame(frames.SETTINGS, 0, 0, entries)


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Calls that have been looked at because of all calls."""
    seen: list[Call] = []

    def visited(self: calls.Calls) -> Iterator[Call]:
        for call in self._calls.values():
            seen.append(call)
            yield call

    monkeypatch.setattr(calls.Calls, "__iter__", visited)
    return seen


def opened(client: RawClient, num_calls: int) -> bytes:
    heads = [frame(frames.HEADERS, WHOLE, 2 * n + 1, client.headers("ModelStreamInfer")) for n in range(num_calls)]
    return b"".join(heads)


def test_only_the_last_window_of_a_settings_frame_is_applied(client: RawClient, visits: list[Call]) -> None:
    client.send(opened(client, 100) + resizing(*range(1, 64), 0) + resizing(0, 7, 0))
    client.send(frame(frames.PING, 0, 0, bytes(8)))
    client.until(frames.PING)
    assert len(visits) == 100
    assert {call.send_window for call in visits} == {0}


def test_every_window_of_a_settings_frame_has_to_be_possible(client: RawClient) -> None:
    client.send(resizing(frames.LARGEST_WINDOW + 1, 0))
    assert client.goaway() == frames.FLOW_CONTROL_ERROR


def test_settings_of_one_frame_are_limited_and_are_refused_by_its_head(client: RawClient) -> None:
    client.send(resizing(*range(65))[: frames.HEAD.size])
    assert client.goaway() == ENHANCE_YOUR_CALM


def test_windows_of_many_calls_are_not_resized_without_end(
    client: RawClient, visits: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flood_limits, "PER_SECOND", 0)
    client.flood(opened(client, 2000) + b"".join(resizing(size) for size in range(4000)))
    assert client.goaway() == ENHANCE_YOUR_CALM
    assert len(visits) <= 64 * BURST


@pytest.mark.parametrize("update", [b"\x20", b"\x3e", b"\x3f\x00", b"\x3f\x80\x01"])
def test_blocks_that_only_resize_the_table(update: bytes) -> None:
    assert HeadDecoder().decode(update * 2).path == ""
    with pytest.raises(ConnectionFailed):
        HeadDecoder().decode(update * 9)


def test_only_small_heads_are_remembered() -> None:
    decoder = HeadDecoder()
    small, large = literal(b"x", b"y"), literal(b"x", b"y" * MAX_REMEMBERED_BYTES)
    assert decoder.decode(small) is decoder.decode(small)
    assert decoder.decode(large) is not decoder.decode(large)


WHOLE_MESSAGE = b"\0" + struct.pack(">I", 2) + b"\x0a\0"


@pytest.mark.parametrize(
    ("method", "begun"),
    [
        *itertools.product(("ModelInfer", "ModelStreamInfer"), (b"", b"\0", b"\0" + struct.pack(">I", 100) + b"half")),
        ("ModelInfer", WHOLE_MESSAGE),  # the end is owed
    ],
)
def test_a_message_that_stops_ends_its_call(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, method: str, begun: bytes
) -> None:
    monkeypatch.setattr(calls, "MESSAGE_PAUSE_S", 0.3)
    client = RawClient(server.grpc_port)
    with closing(client.socket):
        client.send(frame(frames.HEADERS, WHOLE, 1, client.headers(method)) + frame(frames.DATA, 0, 1, begun))
        if method == "ModelStreamInfer" and not begun:  # nothing is owed
            client.socket.settimeout(1)
            with pytest.raises(TimeoutError):
                client.status(1)
        else:
            assert client.status(1)["grpc-status"] == "4"


def test_a_message_that_goes_on_is_waited_for(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MESSAGE_PAUSE_S", 1.0)
    client = RawClient(server.grpc_port)
    with closing(client.socket):
        client.send(frame(frames.HEADERS, WHOLE, 1, client.headers("ServerReady")))
        for byte in b"\0" + struct.pack(">I", 8):
            client.send(frame(frames.DATA, 0, 1, bytes([byte])))
            time.sleep(0.3)
        client.send(frame(frames.DATA, END, 1, b"\x0a\x06unread"[:8]))
        assert client.status(1)["grpc-status"] == "0"
