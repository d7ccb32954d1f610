"""What is bounded is bounded in every state that a request can be in.

The states are those of the request that is too large: read by its handler, answered before its end, waiting behind
another one, and the one after those. The bounds are of all that is no body: request line, headers, what is between the
chunks, trailers.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from llmserve.frontends.http import bodies
from llmserve.wire.http1 import deadlines
from llmserve.wire.http1.parser import FRAMING_BYTES, MAX_HEADER_BYTES
from llmserve.wire.http1.server import HttpServer
from tests.wire.http1.raw_client import Client, Connect, Handlers, until

CHUNKED = b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
STATES = ("read", "answered", "waiting", "next")
ENDLESS = {
    "digits of a chunk's size": (b"1\r\nx\r\n", b"0" * 5000),
    "one extension of a chunk": (b"1\r\nx\r\n1;", b"x" * 5000),
    "extensions of a chunk": (b"1\r\nx\r\n1", b";a=b" * 1000),
    "small chunks with large extensions": (b"", b"1;" + b"e" * 5000 + b"\r\nx\r\n"),
    "one trailer": (b"1\r\nx\r\n0\r\nx: ", b"y" * 5000),
    "a trailer's name": (b"0\r\n", b"y" * 5000),
    "trailers": (b"0\r\n", b"x: y\r\n" * 1000),
}


async def begin(client: Client, handlers: Handlers, state: str) -> None:
    """Bring a connection to the point where a request in `state` has sent its headers."""
    if state == "waiting":
        client.get("/forever")
        await until(lambda: handlers.running == 1)
    if state == "next":
        client.post("/echo", b"x" * 100_000)
        assert len(await client.body()) == 100_000
    client.send(b"POST " + (b"/refused" if state == "answered" else b"/echo") + CHUNKED)
    if state == "answered":
        assert await client.body() == b"/refused"


async def send_until_closed(client: Client, pieces: Iterator[bytes], *, most: int) -> bytes:
    """What the server says until it closes; it must not have taken `most` bytes before."""

    async def send() -> None:
        sent = 0
        for piece in pieces:
            if piece:
                client.send(piece)
            await client.writer.drain()
            await asyncio.sleep(0.001)
            sent += len(piece)
            assert sent < most, "there is no limit"

    sending = asyncio.create_task(send())
    received = b""
    with suppress(ConnectionError):
        async with asyncio.timeout(60):
            while data := await client.reader.read(65536):
                received += data
    sending.cancel()
    outcome = (await asyncio.gather(sending, return_exceptions=True))[0]
    assert not isinstance(outcome, AssertionError), outcome
    return received


def repeated(first: bytes, more: bytes) -> Iterator[bytes]:
    yield first
    yield from itertools.repeat(more)


@pytest.mark.parametrize("what", ENDLESS)
@pytest.mark.parametrize("state", STATES)
async def test_what_is_no_body_is_bounded(
    server: HttpServer,
    connect: Connect,
    handlers: Handlers,
    state: str,
    what: str,
) -> None:
    client = await connect(server)
    await begin(client, handlers, state)
    said = await send_until_closed(client, repeated(*ENDLESS[what]), most=40_000_000)
    expected = b"" if state == "answered" else b"HTTP/1.1 431"
    assert said.startswith(expected) or said == b""  # a reset may overtake it
    assert said.count(b"HTTP/1.1") <= 1
    await until(lambda: handlers.running == 0)


@pytest.mark.parametrize("state", STATES)
async def test_trailers_within_bounds_are_read_over(
    server: HttpServer,
    connect: Connect,
    handlers: Handlers,
    state: str,
) -> None:
    client = await connect(server)
    await begin(client, handlers, state)
    client.send(b"3\r\nabc\r\n0\r\n" + b"x: " + b"y" * (MAX_HEADER_BYTES // 2) + b"\r\n\r\n")
    handlers.may_end.set()
    if state == "waiting":
        assert await client.body() == b"at last"
    if state != "answered":
        assert await client.body() == b"abc"
    client.get("/next")
    assert await client.body() == b"/next"


async def test_chunks_of_one_byte_are_no_attack(server: HttpServer, connect: Connect) -> None:
    client = await connect(server)
    client.send(b"POST /echo" + CHUNKED + b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n")
    assert await client.body() == b"x" * 50_000
    assert len(b"1\r\n\r\n") <= FRAMING_BYTES


@pytest.mark.parametrize("size", [-100, 100, 6000, 200_000])
@pytest.mark.parametrize("piece", [5000, 70_000, 1_000_000])
@pytest.mark.parametrize("form", ["line", "one header", "many headers"])
@pytest.mark.parametrize("before", [0, 1000])
async def test_headers_have_one_limit_however_they_come(
    server: HttpServer,
    connect: Connect,
    handlers: Handlers,
    form: str,
    piece: int,
    size: int,
    before: int,
) -> None:
    """`size`: bytes over the limit; `before`: of a body that comes with them."""
    client = await connect(server)
    if before:
        client.post("/echo", b"b" * before)
    fixed = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
    length = MAX_HEADER_BYTES + size - len(fixed)
    request = {
        "line": b"GET /x%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"x" * length),
        "one header": b"GET /x HTTP/1.1\r\nHost: x\r\nx: %b\r\n\r\n" % (b"y" * (length - 5)),
        "many headers": b"GET /x HTTP/1.1\r\nHost: x\r\n%b\r\n" % (b"x: y\r\n" * (length // 6)),
    }[form]
    pieces = [request[start : start + piece] for start in range(0, len(request), piece)]
    if size > 0:
        said = await send_until_closed(client, itertools.chain(pieces, itertools.repeat(b"")), most=10**9)
        statuses = re.findall(rb"HTTP/1.1 (\d+)", said)
        assert b"431" in statuses or size > piece  # else a reset may overtake it
        assert not any(request.path.startswith("/x") for request in handlers.seen)
        return
    for part in pieces:
        client.send(part)
        await asyncio.sleep(0.001)
    if before:
        assert len(await client.body()) == before
    assert (await client.answer())[0] == 200
    client.get("/next")
    assert await client.body() == b"/next"


async def test_requests_ahead_of_their_answers_wait_unread(
    server: HttpServer,
    connect: Connect,
    handlers: Handlers,
) -> None:
    """However small: what is parsed of a read is a slice, and the rest waits as bytes."""
    client = await connect(server)
    client.get("/forever")
    await until(lambda: handlers.running == 1)
    client.send(b"GET /a HTTP/1.1\r\n\r\n" * 3000)
    await asyncio.sleep(0.2)
    (connection,) = server._connections
    assert len(connection._requests._waiting) < 1000
    handlers.may_end.set()
    assert await client.body() == b"at last"
    for _ in range(3000):
        assert await client.body() == b"/a"


async def test_trailers_that_stop_have_an_end(
    server: HttpServer,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "BODY_PAUSE_S", 0.3)
    monkeypatch.setattr(deadlines, "HEADERS_TIMEOUT_S", 0.3)
    monkeypatch.setattr(deadlines, "KEEP_ALIVE_S", 0.3)
    read, answered = await connect(server), await connect(server)
    read.send(b"POST /echo" + CHUNKED + b"1\r\nx\r\n0\r\nx:")
    answered.send(b"POST /refused" + CHUNKED + b"1\r\nx\r\n0\r\nx:")
    assert await answered.body() == b"/refused"
    assert await answered.rest() == b""
    assert await read.rest() == b""  # its handler does not answer errors: that is for front ends


async def test_a_body_that_trickles_has_an_end(
    server: HttpServer,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Never pausing for long, and yet without end."""
    monkeypatch.setattr(bodies, "BODY_START_S", 0.3)
    client = await connect(server)
    client.send(b"POST /echo HTTP/1.1\r\nContent-Length: 100000\r\n\r\n")
    said = await send_until_closed(client, trickle(), most=1000)
    assert said == b""


def trickle() -> Iterator[bytes]:
    while True:
        time.sleep(0.01)
        yield b"x"


async def test_nothing_is_said_in_the_middle_of_an_answer(server: HttpServer, connect: Connect) -> None:
    """What is wrong behind a request whose answer has begun ends the connection without words."""
    client = await connect(server)
    client.get("/flood")
    assert (await client.answer())[0] == 200
    client.send(b"no HTTP at all\r\n\r\n")
    assert b"HTTP/1.1 400" not in await client.rest()
