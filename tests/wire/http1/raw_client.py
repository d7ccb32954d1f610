"""A client of HTTP/1.1 byte by byte, and handlers that do little."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from llmserve.frontends.http.bodies import read_body
from llmserve.wire.http1.answers import Answer, Reply, WholeAnswer
from llmserve.wire.http1.request import Request
from llmserve.wire.http1.server import HttpServer

HOST = "127.0.0.1"
LIMIT = 1 << 20


class Pieces:
    async def send(self, reply: Reply) -> None:
        reply.begin(200, {}, "text/plain")
        for piece in (b"one", b"two"):
            await reply.piece(piece)
        reply.end()


class Broken:
    async def send(self, reply: Reply) -> None:
        reply.begin(200, {}, "text/plain")
        await reply.piece(b"one")
        raise RuntimeError("half an answer")


class Flood:
    async def send(self, reply: Reply) -> None:
        reply.begin(200, {}, "text/plain")
        for _ in range(10_000):
            Flood.num_pieces += 1
            await reply.piece(b"x" * 10_000)

    num_pieces = 0


@dataclass
class Handlers:
    """By path. `running` counts those of /forever."""

    running: int = 0
    seen: list[Request] = field(default_factory=list)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, request: Request) -> Answer:
        self.seen.append(request)
        if request.path == "/echo":
            return WholeAnswer(bytes(await read_body(request, LIMIT)), content_type="text/plain")
        if request.path == "/forever":
            return await request.while_connected(self._forever())
        known: dict[str, Answer] = {
            "/pieces": Pieces(), "/broken": Broken(), "/flood": Flood(), "/large": WholeAnswer(b"y" * 3_000_000),
        }  # fmt: skip
        return known.get(request.path, WholeAnswer(request.path.encode()))

    async def _forever(self) -> Answer:
        self.running += 1
        try:
            await self.may_end.wait()
            return WholeAnswer(b"at last")
        finally:
            self.running -= 1


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def get(self, path: str, *headers: str) -> None:
        self.send("\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers, "\r\n"]).encode())

    def post(self, path: str, body: bytes, *headers: str) -> None:
        lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers, "\r\n"]
        self.send("\r\n".join(lines).encode() + body)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next answer, whose length is announced."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        lines = head.split("\r\n")[1:-2]
        headers = {name: value for name, _, value in (line.partition(": ") for line in lines)}
        body = await self.reader.readexactly(int(headers.get("Content-Length", "0")))
        return int(head.split()[1]), headers, body

    async def body(self) -> bytes:
        return (await self.answer())[2]

    async def rest(self) -> bytes:
        return await self.reader.read()


Connect = Callable[[HttpServer], Awaitable[Client]]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - of the server's side
            await asyncio.sleep(0.005)
