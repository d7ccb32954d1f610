"""What a server of HTTP/1.1 owes its clients, byte by byte: on one connection, with handlers that do little."""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus

import pytest

from llmserve.wire import listener
from llmserve.wire.http1 import deadlines
from llmserve.wire.http1.connection import Connection
from llmserve.wire.http1.pipelining import MAX_WAITING
from llmserve.wire.http1.server import HttpServer, serve
from llmserve.wire.request_memory import RequestMemory
from tests.wire.http1.raw_client import HOST, LIMIT, Client, Connect, Flood, Handlers, until


async def test_a_connection_is_used_again(client: Client, handlers: Handlers) -> None:
    for number in range(3):
        client.post("/echo", b"%d" % number)
        status, headers, body = await client.answer()
        assert (status, body, headers["Content-Type"]) == (200, b"%d" % number, "text/plain")
        assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", headers["Date"])
        assert "Connection" not in headers
    assert len(handlers.seen) == 3


async def test_byte_by_byte(client: Client) -> None:
    for byte in b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello":
        client.send(bytes([byte]))
        await asyncio.sleep(0)
    assert await client.body() == b"hello"


async def test_headers_are_found_whatever_their_case(client: Client, handlers: Handlers) -> None:
    client.get("/a", "X-Word: first", "x-word: second", "X-Latin: \xe9")
    assert await client.body() == b"/a"
    request = handlers.seen[0]
    assert (request.header(b"x-word"), request.header(b"x-none")) == ("first", None)
    assert [value for name, value in request.header_items() if name == "x-word"] == ["first", "second"]


@pytest.mark.parametrize(
    ("target", "path"),
    [("/a?b=c/d", "/a"), ("/a#b", "/a"), ("http://x:80/a/b?c", "/a/b"), ("/a%20b%2Fc", "/a b/c"), ("*", "*")],
)
async def test_targets(client: Client, target: str, path: str) -> None:
    client.get(target)
    assert await client.body() == path.encode()


@pytest.mark.parametrize("target", [b"http://", b"http://[x/a", b"/\xff", b"a/b"])
async def test_targets_that_are_none(client: Client, handlers: Handlers, target: bytes) -> None:
    client.send(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await client.rest()).startswith(b"HTTP/1.1 400")
    assert handlers.seen == []


async def test_chunks_and_what_follows_them(client: Client, handlers: Handlers) -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    client.send(head + b"3\r\nabc\r\n4;name=value\r\ndefg\r\n0\r\nX-Sum: 1\r\n\r\n")
    assert await client.body() == b"abcdefg"
    assert handlers.seen[0].header(b"x-sum") is None
    client.get("/next")
    assert await client.body() == b"/next"


async def test_a_body_in_pieces_is_put_together(client: Client) -> None:
    client.send(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n\r\n")
    for letter in b"abc":
        client.send(bytes([letter]) * 100_000)
        await asyncio.sleep(0.02)
    assert await client.body() == b"a" * 100_000 + b"b" * 100_000 + b"c" * 100_000


async def test_a_client_that_expects_100_is_told_to_go_on(client: Client) -> None:
    client.send(b"POST /echo HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")
    assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(b"hello")
    assert await client.body() == b"hello"


async def test_a_client_that_expects_100_may_be_refused_at_once(client: Client) -> None:
    client.send(b"POST /refused HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")
    assert await client.body() == b"/refused"


async def test_an_answer_before_the_end_of_the_body(client: Client) -> None:
    client.send(b"POST /refused HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 1000)
    assert await client.body() == b"/refused"
    client.send(b"x" * 999_000)
    client.get("/next")
    assert await client.body() == b"/next"


async def test_http_1_0(server: HttpServer, client: Client, connect: Connect) -> None:
    client.send(b"POST /echo HTTP/1.0\r\nContent-Length: 2\r\n\r\nhi")
    assert (await client.answer())[1]["Connection"] == "close"
    assert await client.rest() == b""
    streaming = await connect(server)
    streaming.send(b"GET /pieces HTTP/1.0\r\n\r\n")
    head, _, body = (await streaming.rest()).partition(b"\r\n\r\n")
    assert (b"Transfer-Encoding" in head, body) == (False, b"onetwo")


async def test_connection_close(client: Client, handlers: Handlers) -> None:
    client.get("/a", "Connection: close")
    client.get("/b")
    status, headers, body = await client.answer()
    assert (status, headers["Connection"], body) == (200, "close", b"/a")
    assert await client.rest() == b""
    assert len(handlers.seen) == 1


@pytest.mark.parametrize("body", [b"", b"hello"])
async def test_offers_of_other_protocols_are_not_taken(client: Client, body: bytes) -> None:
    """As Java's client makes them with each first request."""
    client.post("/echo", body, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    client.post("/echo", b"next")
    assert await client.body() == body
    assert await client.body() == b"next"


async def test_there_is_no_tunnel(client: Client, handlers: Handlers) -> None:
    client.send(b"CONNECT x:80 HTTP/1.1\r\nHost: x:80\r\n\r\nGET / HTTP/1.1\r\n\r\n")
    assert (await client.rest()).startswith(b"HTTP/1.1 400")
    assert handlers.seen == []


async def test_head_has_no_body(client: Client) -> None:
    client.send(b"HEAD /four HTTP/1.1\r\nHost: x\r\n\r\n")
    head = await client.reader.readuntil(b"\r\n\r\n")
    assert b"Content-Length: 5\r\n" in head
    client.get("/next")
    assert await client.body() == b"/next"


async def test_pieces_are_chunks(client: Client) -> None:
    client.get("/pieces")
    assert (await client.answer())[1]["Transfer-Encoding"] == "chunked"
    assert await client.reader.readuntil(b"0\r\n\r\n") == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
    client.get("/next")
    assert await client.body() == b"/next"


async def test_half_an_answer_ends_the_connection(client: Client) -> None:
    client.get("/broken")
    assert (await client.rest()).endswith(b"3\r\none\r\n")


async def test_large_answers(client: Client) -> None:
    for _ in range(2):
        client.get("/large")
    for _ in range(2):
        assert await client.body() == b"y" * 3_000_000


async def test_many_requests_at_once_are_answered_in_order(client: Client, handlers: Handlers) -> None:
    count = 10 * MAX_WAITING
    for number in range(count):
        client.post("/echo", b"%d" % number * 1000)
    assert [await client.body() for _ in range(count)] == [b"%d" % number * 1000 for number in range(count)]


async def test_headers_behind_a_large_body_are_not_large(client: Client) -> None:
    """They are read together."""
    for _ in range(3):
        client.post("/echo", b"x" * 100_000)
        client.send(b"GET /next HTTP/1.1\r\nHost:")
        assert len(await client.body()) == 100_000
        client.send(b" x\r\n\r\n")
        assert await client.body() == b"/next"


async def test_requests_behind_a_running_one_are_bounded(client: Client, handlers: Handlers) -> None:
    """What does not fit into the buffers stays with the client, and comes when there is room."""
    client.get("/forever")
    for _ in range(40):
        client.post("/echo", b"z" * (LIMIT - 1))
    await asyncio.sleep(0.2)
    assert client.writer.transport.get_write_buffer_size() > 0
    assert len(handlers.seen) == 1
    handlers.may_end.set()
    assert await client.body() == b"at last"
    for _ in range(40):
        assert len(await client.body()) == LIMIT - 1


@pytest.mark.parametrize("behind", [b"", b"GET /next HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /half"])
async def test_a_client_that_goes_cancels_its_request(client: Client, handlers: Handlers, behind: bytes) -> None:
    client.get("/forever")
    client.send(behind)
    await until(lambda: handlers.running == 1)
    client.writer.transport.abort()
    await until(lambda: handlers.running == 0)
    assert len(handlers.seen) == 1


async def test_a_client_that_has_gone_before_its_work_begins(client: Client, handlers: Handlers) -> None:
    client.post("/echo", b"")
    client.get("/forever")
    client.writer.transport.abort()
    await until(lambda: handlers.running == 0)


async def test_a_client_that_does_not_read_holds_up_its_answer(client: Client) -> None:
    Flood.num_pieces = 0
    client.get("/flood")
    await asyncio.sleep(0.3)
    paused_at = Flood.num_pieces
    await asyncio.sleep(0.1)
    assert 0 < paused_at == Flood.num_pieces < 5_000
    while Flood.num_pieces == paused_at:
        await client.reader.read(1 << 20)


async def test_a_client_that_reads_nothing_for_long_is_cut_off(
    client: Client, handlers: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the memory that its answer has. No kernel's buffers have room for this one."""
    monkeypatch.setattr(deadlines, "UNREAD_TIMEOUT_S", 0.1)
    Flood.num_pieces = 0
    client.get("/flood")
    await until(lambda: Flood.num_pieces == 10_000)  # to nobody


async def test_a_client_that_reads_slowly_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "UNREAD_TIMEOUT_S", 0.01)
    unsent, is_cut_off = [4, 3, 2, 2], asyncio.Event()

    class Slow:
        is_serving = is_in_headers = True
        cut_off = is_cut_off.set

        @property
        def num_unsent(self) -> int:
            return unsent.pop(0)

        def refuse(self, status: HTTPStatus, problem: str) -> None: ...

        def close(self) -> None: ...

    watching = deadlines.Deadlines(Slow())
    watching.reading_stopped()
    await is_cut_off.wait()
    assert unsent == []


async def test_idle_connections_are_closed(
    server: HttpServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "HEADERS_TIMEOUT_S", 0.2)
    monkeypatch.setattr(deadlines, "KEEP_ALIVE_S", 0.3)
    silent = await connect(server)
    assert await silent.rest() == b""
    used = await connect(server)
    used.get("/a")
    assert await used.body() == b"/a"
    assert await used.rest() == b""


async def test_headers_behind_a_running_request_have_their_time_after_it(
    server: HttpServer, connect: Connect, handlers: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "HEADERS_TIMEOUT_S", 0.1)
    monkeypatch.setattr(deadlines, "KEEP_ALIVE_S", 0.1)
    client = await connect(server)
    client.get("/forever")
    client.send(b"GET /half")
    await asyncio.sleep(0.3)
    assert handlers.running == 1
    handlers.may_end.set()
    assert await client.body() == b"at last"
    assert (await client.answer())[0] == 408
    assert await client.rest() == b""


async def test_the_end_of_a_server(handlers: Handlers, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle connections are closed; a request that ends in time is answered; one that does not is told so."""
    monkeypatch.setattr(listener, "CLOSE_TIMEOUT_S", 0.5)
    server = await serve(handlers, HOST, 0, flag="--http-port")
    idle, slow, never = [await connect(server) for _ in range(3)]
    idle.get("/a")
    await idle.body()
    slow.get("/forever")
    await until(lambda: handlers.running == 1)
    stopping = asyncio.create_task(server.stop())
    assert await idle.rest() == b""
    handlers.may_end.set()
    status, headers, body = await slow.answer()
    assert (status, headers["Connection"], body) == (200, "close", b"at last")
    await stopping
    assert await never.rest() == b""
    with pytest.raises(ConnectionRefusedError):
        await connect(server)


async def test_requests_that_outlast_the_server_are_told(
    handlers: Handlers, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "CLOSE_TIMEOUT_S", 0.1)
    server = await serve(handlers, HOST, 0, flag="--http-port")
    client = await connect(server)
    client.get("/forever")
    await until(lambda: handlers.running == 1)
    await server.stop()
    assert (await client.answer())[0] == 503
    await until(lambda: handlers.running == 0)


class Collecting(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []
        self.has_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.pieces.append(bytes(data))

    def is_closing(self) -> bool:
        return self.has_closed

    def close(self) -> None:
        self.has_closed = True


async def test_what_is_written_in_one_turn_of_the_loop_goes_out_together(handlers: Handlers) -> None:
    transport, connection = Collecting(), Connection(handlers, set(), RequestMemory())
    connection.connection_made(transport)
    connection.write(b"one, ")
    connection.write(b"two")
    assert transport.pieces == []
    await asyncio.sleep(0)
    assert transport.pieces == [b"one, two"]
    connection.write(b"head")
    connection.write(b"y" * 100_000)  # too much to copy
    assert transport.pieces[1:] == [b"head", b"y" * 100_000]
    for _ in range(7):
        connection.write(b"z" * 10_000)
    assert transport.pieces[3:] == [b"z" * 70_000]  # too much to keep
    connection.write(b"the last words")
    connection.leave()
    assert transport.pieces[-1] == b"the last words"
    assert transport.has_closed
    connection.connection_lost(None)
