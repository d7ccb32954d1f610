"""Peers that misuse HTTP itself: endless, tiny and too many parts of requests, over either version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, count, islice, repeat

import pytest

from llmserve.wire.http2 import frames
from llmserve.wire.http2.frames import frame
from tests.hostile.attacks import MIB, at_once, http2, literal, open_call, send, status, works
from tests.hostile.conftest import IS_STRICT, Target

SIZE = (120 if IS_STRICT else 2) * MIB
NUM_PEERS = 8 if IS_STRICT else 4
ANSWER_S = 5 if IS_STRICT else 0.3  # many of these are never answered
CHUNKED = b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
GET, POST = b"GET /v2" + CHUNKED, b"POST /v2/models/texts/infer" + CHUNKED


def endless(piece: bytes) -> Iterator[bytes]:
    many = piece * (64 * 1024 // len(piece))
    return repeat(many, SIZE // len(many))


@pytest.mark.parametrize("head", [GET, POST], ids=["answered", "read"])
@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"0\r\nx: ", b"y"),
        (b"0\r\n", b"x: y\r\n"),
        (b"1;", b"x"),
        (b"", b"0"),
        (b"", b"1;" + b"e" * 5000 + b"\r\nx\r\n"),
        (b"", b"1\r\nx\r\n"),
    ],
    ids=["trailer", "trailers", "extension", "size", "extensions", "tiny chunks"],
)
def test_what_is_between_and_behind_bodies(target: Target, head: bytes, begin: bytes, piece: bytes) -> None:
    with target.watched():
        at_once(lambda: send(target.http_port, chain([head + begin], endless(piece)), timeout_s=ANSWER_S), NUM_PEERS)
    assert works(target.http_port, target.grpc_port)


@pytest.mark.parametrize(
    "piece",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"POST /v2/models/texts/infer HTTP/1.1\r\nContent-Length: 1\r\n\r\n{",
        b"\r\n",
    ],
    ids=["small", "upgrades", "bad", "empty lines"],
)
def test_requests_ahead_of_their_answers(target: Target, piece: bytes) -> None:
    with target.watched():
        at_once(
            lambda: send(target.http_port, islice(endless(piece), 40 if IS_STRICT else 1), timeout_s=ANSWER_S),
            NUM_PEERS,
        )
    assert works(target.http_port, target.grpc_port)


@pytest.mark.parametrize("cut", [1, 2])
def test_headers_of_70_kilobytes(target: Target, cut: int) -> None:
    request = b"GET /v2 HTTP/1.1\r\nHost: x\r\nx: " + b"y" * 70_000 + b"\r\n\r\n"
    size = len(request) // cut
    pieces = [request[:size], request[size:]]
    assert status(send(target.http_port, pieces, timeout_s=5)) == 431


STREAMS = partial(count, 1, 2)
FLOODS: dict[str, Callable[[], Iterable[bytes]]] = {
    "table sizes": lambda: (frame(frames.HEADERS, 5, stream, b"\x20" * 70_000) for stream in STREAMS()),
    "many table sizes": lambda: (frame(frames.HEADERS, 5, stream, b"\x20" * 1_000_000) for stream in STREAMS()),
    "large headers": lambda: (
        frame(frames.HEADERS, 5, stream, b"".join(literal(b"x-%d" % n, b"%d" % stream + b"y" * 8000) for n in range(8)))
        for stream in STREAMS()
    ),
    "large headers in Huffman's code": lambda: (
        frame(frames.HEADERS, 5, stream, b"\0\x01x" + b"\xff\xff\x9f\x04" + b"\0" * 70_000) for stream in STREAMS()
    ),
    "empty data": lambda: chain([open_call(1)], repeat(frame(frames.DATA, 0, 1) * 5000)),
    "one byte of data": lambda: chain(
        [open_call(1) + frame(frames.DATA, 0, 1, b"\0\x00\x80\0\0")], repeat(frame(frames.DATA, 0, 1, b"x") * 5000)
    ),
    "settings": lambda: repeat(frame(frames.SETTINGS, 0, 0) * 5000),
    "pings": lambda: repeat(frame(frames.PING, 0, 0, b"12345678") * 5000),
    "windows": lambda: repeat(frames.window_update(0, 1) * 5000),
    "resets": lambda: (open_call(stream) + frames.reset(stream, 8) for stream in STREAMS()),
    "calls": lambda: (open_call(stream, "ServerLive") for stream in STREAMS()),
    "unknown methods": lambda: (open_call(stream, "Nope") for stream in STREAMS()),
    "trailers of ended calls": lambda: chain(
        [open_call(1, "Nope")], repeat(frame(frames.HEADERS, 5, 1, literal(b"x", b"y")) * 5000)
    ),
    "endless headers": lambda: chain(
        [frame(frames.HEADERS, 0, 1, b"")], repeat(frame(frames.CONTINUATION, 0, 1, b"") * 1000)
    ),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_floods_of_frames(target: Target, flood: str) -> None:
    def attack() -> None:
        sent = 0
        pieces = []
        for piece in FLOODS[flood]():
            pieces.append(piece)
            sent += len(piece)
            if sent > SIZE // 8:
                break
        http2(target.grpc_port, pieces, timeout_s=ANSWER_S)

    with target.watched():
        at_once(attack, NUM_PEERS)
    assert works(target.http_port, target.grpc_port)
