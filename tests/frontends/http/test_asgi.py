"""The bridge from our listener to an ASGI application, with applications of a few lines."""

from __future__ import annotations

import asyncio
import http.client
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from llmserve.errors import LlmserveError
from llmserve.frontends.http.asgi import Application, AsgiAnswer, Message, Receive, Send
from llmserve.frontends.http.error_answers import answers_errors
from llmserve.wire.http1.answers import Answer
from llmserve.wire.http1.request import Request
from llmserve.wire.http1.server import serve

HOST = "127.0.0.1"


@asynccontextmanager
async def serving(application: Application, max_input_bytes: int = 1000) -> AsyncIterator[int]:
    async def answer(request: Request) -> Answer:
        return AsgiAnswer(application, request, max_input_bytes)

    server = await serve(answers_errors(answer), HOST, 0, flag="--http-port")
    try:
        yield server.port
    finally:
        await server.stop()


async def ask(port: int, method: str = "GET", path: str = "/", body: bytes | None = None) -> tuple[int, Any, bytes]:
    def blocking() -> tuple[int, Any, bytes]:
        connection = http.client.HTTPConnection(HOST, port, timeout=20)
        connection.request(method, path, body, {"X-Team": "red"})
        answer = connection.getresponse()
        found = answer.status, answer.headers, answer.read()
        connection.close()
        return found

    return await asyncio.to_thread(blocking)


def answering(body: Callable[[Message, Receive], Awaitable[bytes]]) -> Application:
    async def application(scope: Message, receive: Receive, send: Send) -> None:
        said = await body(scope, receive)
        headers = [(b"content-type", b"text/x"), (b"x-own", b"1"), (b"content-length", b"999")]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": said})

    return application


async def test_the_scope_says_what_the_client_asks() -> None:
    seen: list[Message] = []

    async def body(scope: Message, receive: Receive) -> bytes:
        seen.append(scope)
        return b"hello"

    async with serving(answering(body)) as port:
        status, headers, said = await ask(port, "PUT", "/a%20b?c=d%20e")
    assert (status, said) == (201, b"hello")
    assert (headers["content-type"], headers["x-own"], headers["content-length"]) == ("text/x", "1", "5")
    scope = seen[0]
    assert (scope["type"], scope["method"], scope["path"], scope["query_string"]) == ("http", "PUT", "/a b", b"c=d%20e")
    assert (b"x-team", b"red") in scope["headers"]
    assert scope["http_version"] == "1.1"


async def test_the_body_comes_whole_and_then_the_clients_going_away() -> None:
    events: list[Message] = []
    ended = asyncio.Event()

    async def application(scope: Message, receive: Receive, send: Send) -> None:
        events.append(await receive())
        try:
            events.append(await receive())
        finally:
            ended.set()

    async with serving(application) as port:
        with socket.create_connection((HOST, port)) as client:
            client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n01234")
            await asyncio.sleep(0.05)
            client.sendall(b"56789")
            await asyncio.sleep(0.05)
            assert not ended.is_set()
        await asyncio.wait_for(ended.wait(), 20)
    assert events[0] == {"type": "http.request", "body": b"0123456789", "more_body": False}
    assert [event["type"] for event in events[1:]] in ([], ["http.disconnect"])  # it is cancelled, too


async def test_a_body_over_the_limit_is_an_error_where_it_is_read() -> None:
    async def body(scope: Message, receive: Receive) -> bytes:
        message = await receive()
        return bytes(message["body"])

    async def application(scope: Message, receive: Receive, send: Send) -> None:
        try:
            await body(scope, receive)
        except LlmserveError as error:
            said = str(error).encode()
            await answering(lambda *_: _later(said))(scope, receive, send)

    async with serving(application, max_input_bytes=10) as port:
        assert b"exceeds the maximum allowed input size of 10 bytes" in (await ask(port, "POST", body=b"x" * 11))[2]


async def _later(said: bytes) -> bytes:
    return said


async def test_a_stream_goes_out_piece_by_piece_and_holds_back() -> None:
    sent = 0

    async def application(scope: Message, receive: Receive, send: Send) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while scope["path"] == "/endless" or sent < 3:
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            sent += 1
        await send({"type": "http.response.body", "body": b"end"})

    async with serving(application) as port:
        status, headers, said = await ask(port)
        assert (status, headers["transfer-encoding"], len(said)) == (200, "chunked", 3 * 65536 + 3)
        with socket.create_connection((HOST, port)) as client:
            client.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.sleep(0.3)
            before = sent
            await asyncio.sleep(0.3)
            assert sent == before < 1000


@pytest.mark.parametrize("how", ["silent", "half"])
async def test_an_application_that_does_not_answer_ends_the_connection(how: str) -> None:
    async def application(scope: Message, receive: Receive, send: Send) -> None:
        if how == "half":
            await send({"type": "http.response.start", "status": 200, "headers": []})

    async with serving(application) as port:
        with pytest.raises(http.client.RemoteDisconnected):
            await ask(port)
