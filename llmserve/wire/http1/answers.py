"""Answers to requests, sent whole or piece by piece."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Final, Protocol, TypeAlias

from llmserve.wire.http1.request import Request
from llmserve.wire.pieces import in_pieces

NOT_MODIFIED = HTTPStatus.NOT_MODIFIED.value
JOINED_BYTES = 64 * 1024  # a larger body is written separately, without copying it
Body: TypeAlias = bytes | memoryview
PHRASES = {HTTPStatus.METHOD_NOT_ALLOWED: "Not Allowed"}  # as in Triton; the others are standard
STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {PHRASES.get(status, status.phrase)}\r\n" for status in HTTPStatus
}


class Wire(Protocol):
    """The connection to which an answer is written."""

    def write(self, data: Body) -> None:
        """Send without waiting; does nothing if the client is gone."""
        ...

    async def writable(self) -> None:
        """Wait until the client has read most of what was written."""
        ...


class Reply:
    """Sends the answer to one request. It is complete after `whole`, or after `begin`, pieces and `end`."""

    __slots__ = ("_chunks", "_head", "_wire", "has_begun", "is_complete", "request", "status")

    def __init__(self, request: Request, wire: Wire) -> None:
        self.request = request
        self.has_begun = False
        self.is_complete = False
        self.status = 0  # none yet
        self._wire = wire
        self._chunks = not request.is_http10
        self._head = b""  # not sent yet: it is sent with the first piece

    async def whole(
        self, status: int, headers: Mapping[str, str], content_type: str, body: bytes, more: Sequence[Body] = ()
    ) -> None:
        """`more`: further parts of a large body, not copied. Waits while the client does not read them."""
        await self._wire.writable()
        if headers.get("Connection") == "close":
            self.request.keeps_alive = False
        self.has_begun = self.is_complete = True
        length = (
            f"Content-Length: {sum(map(len, more), len(body))}\r\n" if status != NOT_MODIFIED else ""
        )  # in a 304, it would be the full answer's
        head = self._make_head(status, headers, content_type, length)
        if self.request.method == "HEAD":
            self._wire.write(head)
        elif len(body) <= JOINED_BYTES:
            self._wire.write(head + body)
        else:
            self._wire.write(head)
            self._wire.write(body)
        if more and self.request.method != "HEAD":
            await self._write_more(more)

    async def _write_more(self, more: Sequence[Body]) -> None:
        self.is_complete = False
        for body in more:
            for piece in in_pieces(body):
                await self._wire.writable()
                self._wire.write(piece)
        self.is_complete = True

    def begin(self, status: int, headers: Mapping[str, str], content_type: str) -> None:
        self.has_begun = True
        framing = "Transfer-Encoding: chunked\r\n" if self._chunks else ""
        self._head = self._make_head(status, headers, content_type, framing)

    async def piece(self, data: bytes) -> None:
        """Send a piece. Waits while the client does not read."""
        if self.request.method == "HEAD":
            return
        await self._wire.writable()
        self._wire.write(b"%b%x\r\n%b\r\n" % (self._head, len(data), data) if self._chunks else self._head + data)
        self._head = b""

    def end(self) -> None:
        self.is_complete = True
        self._wire.write(self._head + (b"0\r\n\r\n" if self._chunks and self.request.method != "HEAD" else b""))

    def _make_head(self, status: int, headers: Mapping[str, str], content_type: str, framing: str) -> bytes:
        self.status = status
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if self.request.answer_headers:
            lines += "".join([f"{name}: {value}\r\n" for name, value in self.request.answer_headers.items()])
        if content_type:
            lines += f"Content-Type: {content_type}\r\n"
        if not self.request.keeps_alive and "Connection" not in headers:
            lines += "Connection: close\r\n"
        return f"{STATUS_LINES[status]}{date_line(int(time.time()))}{framing}{lines}\r\n".encode("latin-1")


class Answer(Protocol):
    """An answer that a handler returns."""

    async def send(self, reply: Reply) -> None: ...


@dataclass(slots=True)
class WholeAnswer:
    """An answer that is sent whole. Its fields are `Final`: creating a `frozen` class takes several times as long."""

    body: Final[bytes] = b""
    status: Final[int] = 200
    content_type: Final[str] = ""
    headers: Final[Mapping[str, str]] = field(default_factory=dict)
    more: Final[Sequence[Body]] = ()  # further parts of the body

    async def send(self, reply: Reply) -> None:
        await reply.whole(self.status, self.headers, self.content_type, self.body, self.more)


@functools.lru_cache(maxsize=1)
def date_line(now_s: int) -> str:
    return f"Date: {formatdate(now_s, usegmt=True)}\r\n"


def refusal(status: HTTPStatus, problem: str) -> bytes:
    """The error response that is sent before a connection is closed."""
    body = json.dumps({"error": problem}).encode()
    head = (
        f"{STATUS_LINES[status.value]}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body
