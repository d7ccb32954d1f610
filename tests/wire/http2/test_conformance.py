"""HTTP/2 as RFC 9113 and RFC 7541 have it, section by section: what every client may do, and what none may.

What breaks the connection's rules ends the connection; what is wrong with one request ends that request, because behind
a proxy the connection carries other clients' calls, too.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator

import pytest
from hpack import Decoder
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from llmserve.frontends.grpc.inference_service import start_grpc
from llmserve.wire.http2 import connection, flood_limits, frames
from llmserve.wire.http2.flood_limits import BURST
from llmserve.wire.http2.frames import ConnectionFailed, frame
from llmserve.wire.http2.headers import MAX_LIST_BYTES, HeadDecoder, request_head, trailers
from llmserve.wire.http2.messages import framed
from llmserve.wire.http2.reader import MAX_FRAME, FrameReader
from tests.frontends.server import HOST, RunningServer, wait_until
from tests.frontends.stub_core import StubCore
from tests.wire.http2.raw_client import RawClient
from tests.wire.http2.test_connection import OK, READY, echo_message, still_works

REQUEST = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x"), (b"content-type", b"application/grpc")]
HEADER_TABLE_SIZE = 1  # a setting


@pytest.fixture
def client(server: RunningServer) -> Iterator[RawClient]:
    made = RawClient(server.grpc_port)
    yield made
    made.socket.close()


def answers(client: RawClient, stream: int) -> bool:
    client.call(stream, "ServerReady", READY)
    return client.status(stream) == OK


def opened(client: RawClient, method: str = "ServerReady", *, flags: int = 0, stream: int = 1) -> bytes:
    return frame(frames.HEADERS, frames.END_HEADERS | flags, stream, client.headers(method))


@pytest.mark.parametrize(
    ("section", "data", "code"),
    [
        ("4.2: larger than we take", (MAX_FRAME + 1).to_bytes(3, "big") + bytes(6), frames.FRAME_SIZE_ERROR),
        (
            "4.3: headers that cannot be read",
            frame(frames.HEADERS, 4, 1, b"\xff\xff\xff\xff\xff"),
            frames.COMPRESSION_ERROR,
        ),
        ("4.3: another frame among headers", frame(1, 0, 1, b"\x83") + frame(6, 0, 0, bytes(8)), frames.PROTOCOL_ERROR),
        ("5.1: DATA on an idle stream", frame(frames.DATA, 0, 1, b"x"), frames.PROTOCOL_ERROR),
        ("5.1: RST_STREAM on an idle stream", frame(frames.RST_STREAM, 0, 5, bytes(4)), frames.PROTOCOL_ERROR),
        ("5.1: WINDOW_UPDATE on an idle stream", frames.window_update(5, 1), frames.PROTOCOL_ERROR),
        ("5.1.1: a stream of even number", frame(frames.HEADERS, 4, 2, b"\x83"), frames.PROTOCOL_ERROR),
        ("6.1: DATA on stream 0", frame(frames.DATA, 0, 0, b"x"), frames.PROTOCOL_ERROR),
        ("6.2: HEADERS on stream 0", frame(frames.HEADERS, 4, 0, b"\x83"), frames.PROTOCOL_ERROR),
        (
            "6.2: more padding than frame",
            frame(frames.HEADERS, 4 | frames.PADDED, 1, b"\x09abc"),
            frames.PROTOCOL_ERROR,
        ),
        (
            "6.2: no room for a priority",
            frame(frames.HEADERS, 4 | frames.HAS_PRIORITY, 1, b"abc"),
            frames.FRAME_SIZE_ERROR,
        ),
        ("6.3: PRIORITY on stream 0", frame(frames.PRIORITY, 0, 0, bytes(5)), frames.PROTOCOL_ERROR),
        ("6.3: PRIORITY of four bytes", frame(frames.PRIORITY, 0, 1, bytes(4)), frames.FRAME_SIZE_ERROR),
        ("6.4: RST_STREAM on stream 0", frame(frames.RST_STREAM, 0, 0, bytes(4)), frames.PROTOCOL_ERROR),
        ("6.4: RST_STREAM of three bytes", frame(frames.RST_STREAM, 0, 1, bytes(3)), frames.FRAME_SIZE_ERROR),
        ("6.5: SETTINGS on a stream", frame(frames.SETTINGS, 0, 1, b""), frames.PROTOCOL_ERROR),
        ("6.5: SETTINGS of five bytes", frame(frames.SETTINGS, 0, 0, b"short"), frames.FRAME_SIZE_ERROR),
        ("6.5: an ACK that has settings", frame(frames.SETTINGS, frames.ACK, 0, bytes(6)), frames.FRAME_SIZE_ERROR),
        ("6.5.2: ENABLE_PUSH", frames.settings({frames.ENABLE_PUSH: 2}), frames.PROTOCOL_ERROR),
        ("6.5.2: INITIAL_WINDOW_SIZE", frames.settings({frames.INITIAL_WINDOW_SIZE: 2**31}), frames.FLOW_CONTROL_ERROR),
        ("6.5.2: MAX_FRAME_SIZE", frames.settings({frames.MAX_FRAME_SIZE: 1}), frames.PROTOCOL_ERROR),
        ("6.5.2: MAX_FRAME_SIZE", frames.settings({frames.MAX_FRAME_SIZE: 2**24}), frames.PROTOCOL_ERROR),
        ("8.4: a client's PUSH_PROMISE", frame(frames.PUSH_PROMISE, 0, 1, bytes(4)), frames.PROTOCOL_ERROR),
        ("6.7: PING on a stream", frame(frames.PING, 0, 1, bytes(8)), frames.PROTOCOL_ERROR),
        ("6.7: PING of five bytes", frame(frames.PING, 0, 0, b"short"), frames.FRAME_SIZE_ERROR),
        ("6.8: GOAWAY on a stream", frame(frames.GOAWAY, 0, 1, bytes(8)), frames.PROTOCOL_ERROR),
        ("6.9: WINDOW_UPDATE of five bytes", frame(frames.WINDOW_UPDATE, 0, 0, bytes(5)), frames.FRAME_SIZE_ERROR),
        ("6.9: a window update of zero", frames.window_update(0, 0), frames.PROTOCOL_ERROR),
        ("6.9.1: a window that is too large", frames.window_update(0, 2**31 - 1), frames.FLOW_CONTROL_ERROR),
        ("6.10: CONTINUATION of nothing", frame(frames.CONTINUATION, 0, 1, b""), frames.PROTOCOL_ERROR),
        ("6.10: of another stream", frame(1, 0, 1, b"\x83") + frame(9, 0, 3, b""), frames.PROTOCOL_ERROR),
        ("10.5.1: without an end", frame(1, 0, 1, b"\x83") + frame(9, 0, 1, bytes(300_000)), frames.ENHANCE_YOUR_CALM),
        ("10.5.1: in pieces of nothing", frame(1, 0, 1, b"\x83") + frame(9, 0, 1, b"") * 99, frames.ENHANCE_YOUR_CALM),
    ],
)
def test_what_ends_the_connection(
    server: RunningServer, client: RawClient, section: str, data: bytes, code: int
) -> None:
    client.send(data)
    assert client.goaway() == code, section
    assert still_works(server)


def test_section_3_4_a_client_begins_with_its_settings(server: RunningServer) -> None:
    for first in (frame(frames.PING, 0, 0, bytes(8)), frame(frames.SETTINGS, frames.ACK, 0)):
        client = RawClient(server.grpc_port, preface=frames.PREFACE + first)
        assert client.goaway() == frames.PROTOCOL_ERROR
        client.socket.close()


@pytest.mark.parametrize("last", [frame(frames.DATA, 0, 1, b"x"), frame(frames.HEADERS, 5, 1, b"\x88")])
def test_section_5_1_nothing_comes_after_the_end_of_a_stream(client: RawClient, core: StubCore, last: bytes) -> None:
    core.slow_s = 30
    client.call(1, "ModelInfer", echo_message(b"").SerializeToString().replace(b"echo", b"slow"))
    wait_until(lambda: core.running == 1)
    client.send(last)
    assert client.goaway() == frames.STREAM_CLOSED
    wait_until(lambda: core.running == 0)


def test_section_5_5_what_is_unknown_is_ignored(client: RawClient) -> None:
    client.send(frame(0x7F, 0xFF, 0, b"a kind of frame") + frame(0x10, 0, 3, b"PRIORITY_UPDATE is one"))
    client.send(frames.settings({0xABCD: 7, 0x9: 1}))
    client.send(frame(frames.PING, 0xFE, 0, bytes(8)) + frame(frames.GOAWAY, 0, 0, bytes(8) + b"a client may leave"))
    client.send(struct.pack(">HBBBI", 0, 5, frames.PRIORITY, 0, 0x80000001) + bytes(5))  # with the reserved bit
    assert answers(client, 1)


def test_section_6_9_the_reserved_bit_of_an_increment_is_ignored(client: RawClient) -> None:
    client.send(frame(frames.WINDOW_UPDATE, 0, 0, b"\x80\0\0\x01"))
    assert answers(client, 1)


def test_section_6_9_2_a_window_that_the_settings_make_too_large(client: RawClient, core: StubCore) -> None:
    client.send(opened(client, "ModelStreamInfer") + frames.window_update(1, 2**31 - 1 - frames.DEFAULT_WINDOW))
    client.send(frames.settings({frames.INITIAL_WINDOW_SIZE: frames.DEFAULT_WINDOW + 1}))
    assert client.goaway() == frames.FLOW_CONTROL_ERROR


async def test_section_6_8_calls_that_come_after_the_end_are_refused() -> None:
    """Safe to send again elsewhere; those before it are answered."""
    server = await start_grpc(StubCore(), HOST, 0)
    client = await asyncio.to_thread(RawClient, server.port)

    def leave_it() -> None:
        assert client.until(frames.GOAWAY)[:8] == frames.WORD.pack(1) + frames.WORD.pack(frames.NO_ERROR)
        client.call(3, "ServerReady", READY)
        assert client.reset(3) == frames.REFUSED_STREAM
        client.send(frame(frames.DATA, frames.END_STREAM, 1, b""))
        assert client.status(1) == OK
        with pytest.raises(EOFError):
            client.receive()
        client.socket.close()

    client.send(opened(client, "ModelStreamInfer") + frame(frames.PING, 0, 0, bytes(8)))
    await asyncio.to_thread(client.until, frames.PING)
    await asyncio.gather(server.stop(), asyncio.to_thread(leave_it))


@pytest.mark.parametrize(
    "wrong",
    [
        [*REQUEST, (b":path", b"/y")],
        [*REQUEST, (b":status", b"200")],
        [*REQUEST, (b"x", b"y"), (b":authority", b"x")],
        REQUEST[1:],
        [*REQUEST[:2], (b":path", b""), REQUEST[3]],
        [*REQUEST, (b"Upper", b"x")],
        [*REQUEST, (b"a name", b"x")],
        [*REQUEST, (b"", b"x")],
        [*REQUEST, (b"x", b"line\r\nbreak")],
        [*REQUEST, (b"x", b"zero\0")],
        [*REQUEST, (b"connection", b"close")],
        [*REQUEST, (b"transfer-encoding", b"chunked")],
        [*REQUEST, (b"te", b"gzip")],
    ],
)
def test_section_8_1_1_a_malformed_request_is_reset_alone(client: RawClient, wrong: list[tuple[bytes, bytes]]) -> None:
    client.send(frame(frames.HEADERS, frames.END_HEADERS, 1, client.encoder.encode(wrong)))
    assert client.reset(1) == frames.PROTOCOL_ERROR
    client.send(frame(frames.DATA, frames.END_STREAM, 1, framed(b"on its way")))
    assert answers(client, 3)


def test_section_8_1_trailers_end_a_request(client: RawClient) -> None:
    client.send(opened(client) + frame(frames.DATA, 0, 1, framed(READY)))
    client.send(
        frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, client.encoder.encode([(b"x-sum", b"1")]))
    )
    assert client.status(1) == OK
    client.send(opened(client, stream=3) + frame(frames.HEADERS, frames.END_HEADERS, 3, b""))
    assert client.reset(3) == frames.PROTOCOL_ERROR
    assert answers(client, 5)


def test_section_5_1_a_stream_that_both_have_ended_gets_nothing_more(client: RawClient) -> None:
    """As grpcio's server ends one: a client that closes its channel then has nothing on its way."""
    client.call(1, "ModelStreamInfer", echo_message(b"all of it").SerializeToString())
    sent: list[tuple[int, int]] = []
    while not sent or sent[-1] != (frames.HEADERS, frames.END_HEADERS | frames.END_STREAM):
        kind, flags, stream, _ = client.receive()
        if stream == 1:
            sent.append((kind, flags))
    assert sent[:-1] == [(frames.HEADERS, frames.END_HEADERS), (frames.DATA, 0)]
    client.send(frame(frames.PING, 0, 0, b"the next"))
    assert client.receive() == (frames.PING, frames.ACK, 0, b"the next")


def test_section_10_5_1_too_many_headers_are_one_calls_error(client: RawClient) -> None:
    client.call(1, "ServerReady", READY, x_long="x" * MAX_LIST_BYTES)
    fields = client.status(1)
    assert fields["grpc-status"] == "8"
    assert "too large" in fields["grpc-message"]
    assert answers(client, 3)


def test_headers_that_grow_when_they_are_read_end_the_connection(client: RawClient) -> None:
    """RFC 7541, section 7.3: a few bytes that stand for many."""
    client.call(1, "ServerReady", READY, x_long="x" * 3900)
    entry = client.encoder.encode([("x-long", "x" * 3900)])
    assert len(entry) == 1
    client.send(frame(frames.HEADERS, frames.END_HEADERS, 3, entry * 10_000))
    assert client.goaway() == frames.ENHANCE_YOUR_CALM


def test_rfc_7541_section_4_2_a_client_that_wants_a_smaller_table(server: RunningServer) -> None:
    """Its next block says that the table is as small as it wants; strict clients, such as Node's, ask for that."""
    client = RawClient(server.grpc_port, preface=frames.PREFACE + frames.settings({HEADER_TABLE_SIZE: 0}))
    client.decoder.max_allowed_table_size = 0
    assert answers(client, 1)
    client.socket.close()


def test_a_client_may_change_its_table(client: RawClient) -> None:
    for stream, size in ((1, 0), (3, 4096), (5, 100)):
        client.encoder.header_table_size = size
        assert answers(client, stream)
    client.send(frame(frames.HEADERS, frames.END_HEADERS, 7, b"\x3f\xe2\x1f"))  # 4097
    assert client.goaway() == frames.COMPRESSION_ERROR


def cancelled_call(client: RawClient, stream: int) -> bytes:
    return (
        opened(client, stream=stream)
        + frame(frames.DATA, frames.END_STREAM, stream, framed(READY))
        + frames.reset(stream, 8)
    )


def test_calls_that_are_cancelled_at_once_leave_nothing_behind(
    client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than may run at a time, each cancelled before its handler has begun."""
    monkeypatch.setattr(connection, "MAX_CALLS", 8)
    for first in (1, 17, 33):
        client.send(b"".join(cancelled_call(client, stream) for stream in range(first, first + 16, 2)))
        client.send(frame(frames.PING, 0, 0, bytes(8)))
        client.until(frames.PING)
    assert answers(client, 101)


@pytest.mark.parametrize(
    "useless",
    [
        frame(frames.PRIORITY, 0, 1, bytes(5)),
        frame(0x7F, 0, 0, b""),
        frame(frames.SETTINGS, 0, 0),
        frame(frames.DATA, 0, 1, b""),
        frame(frames.DATA, frames.PADDED, 1, b"\x02\0\0"),
    ],
)
def test_section_10_5_floods_end_the_connection(
    server: RunningServer, client: RawClient, useless: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flood_limits, "PER_SECOND", 0)
    client.send(opened(client, "ModelStreamInfer"))
    client.flood(useless * (2 * BURST))
    assert client.goaway() == frames.ENHANCE_YOUR_CALM
    assert still_works(server)


def test_section_10_5_a_flood_of_cancelled_calls(
    server: RunningServer, client: RawClient, core: StubCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flood_limits, "PER_SECOND", 0)  # or a busy machine takes them as slowly as is allowed
    client.flood(b"".join(cancelled_call(client, stream) for stream in range(1, 4 * BURST, 2)))
    assert client.goaway() == frames.ENHANCE_YOUR_CALM
    assert still_works(server)
    wait_until(lambda: core.running == 0)


def test_statuses_that_are_not_read_have_an_end(server: RunningServer) -> None:
    """No window holds them back."""
    request = service_pb2.ModelReadyRequest(name="echo", version="x" * 4000).SerializeToString()
    client = RawClient(server.grpc_port)
    client.socket.settimeout(1)
    with pytest.raises((ConnectionError, TimeoutError)):  # noqa: PT012
        for stream in range(1, 2**20, 2):
            client.call(stream, "ModelReady", request)
    client.socket.close()
    assert still_works(server)


def test_details_are_cut_to_what_clients_take() -> None:
    def message(details: str) -> bytes:
        return bytes(list(Decoder().decode(trailers(13, details), raw=True))[1][1])

    assert message("x" * 9000) == b"x" * 4096
    assert message("50% " * 2000) == b"50%25 " * 682 + b"50"
    assert message("name \udcff, Ж\n") == b"name ?, %D0%96%0A"


def test_metadata() -> None:
    pairs = [
        (b"x", b"1"),
        (b"x", b" 2\t"),
        (b"y-bin", b"AAE"),
        (b"y-bin", b"AAE=, //8="),
        (b"z-bin", b"!"),
        (b"grpc-x", b""),
    ]
    texts = (("x", "1"), ("x", " 2\t"))
    expected = (*texts, ("y-bin", b"\0\1"), ("y-bin", b"\0\1"), ("y-bin", b"\xff\xff"), ("z-bin", b""))
    head = request_head([*REQUEST, *pairs])
    assert (head.metadata, head.fault) == (expected, "")


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=60), max_size=8))
def test_any_bytes_are_headers_or_a_known_error(blocks: list[bytes]) -> None:
    decoder = HeadDecoder()
    try:
        for block in blocks:
            decoder.decode(block)
    except ConnectionFailed:
        pass


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 255), st.integers(0, 5), st.binary(max_size=30)), max_size=8),
    st.integers(1, 40),
)
def test_frames_may_be_cut_anywhere(pieces: list[tuple[int, int, int, bytes]], cut: int) -> None:
    data = frames.PREFACE + frames.settings({}) + b"".join(frame(*each) for each in pieces)

    def read(pieces: list[bytes]) -> tuple[list[object], str]:
        taken: list[object] = []
        reader = FrameReader(lambda *each: taken.append(each))
        try:
            for piece in pieces:
                reader.feed(piece)
        except ConnectionFailed as failure:
            return taken, str(failure)
        return taken, ""

    assert read([data]) == read([data[at : at + cut] for at in range(0, len(data), cut)])
