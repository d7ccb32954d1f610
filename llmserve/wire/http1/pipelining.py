"""Serves requests in order: while one is answered, those that the client sent ahead wait."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from llmserve.wire.http1.request import Request

MAX_WAITING = 16  # requests behind the one that is answered
MAX_WAITING_BYTES = 64 * 1024  # of the body of such a request
MAX_UNREAD_BYTES = 1024 * 1024  # of the body of the one that is answered, while its handler does not wait for it


class Served(Protocol):
    """A connection, as its requests see it."""

    def start(self, request: Request) -> None:
        """Begin to answer."""
        ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class PipelinedRequests:
    """A `parser.RequestSink`. While too much waits, nothing is read from the client."""

    def __init__(self, connection: Served) -> None:
        self.running: Request | None = None
        self._connection = connection
        self._waiting: deque[Request] = deque()
        self._arriving: Request | None = None  # its body is arriving and still needed

    def begin(self, request: Request) -> None:
        self._arriving = request
        if self.running is None:
            self._start(request)
            return
        self._waiting.append(request)
        if len(self._waiting) >= MAX_WAITING:
            self._connection.pause_reading()

    def add(self, data: bytes) -> None:
        if self._arriving is None:
            return
        self._arriving.add(data)
        if self._arriving is not self.running:
            if self._arriving.num_bytes > MAX_WAITING_BYTES:
                self._connection.pause_reading()
        elif self._arriving.num_bytes > MAX_UNREAD_BYTES and not self._arriving.is_awaited:
            self._connection.pause_reading()  # its handler does something else first
            self._arriving.before_waiting(self._connection.resume_reading)

    def end(self) -> None:
        if self._arriving is not None:
            self._arriving.end()
            if self._arriving is self.running:
                self._connection.resume_reading()  # else nobody would notice that the client disconnects
            self._arriving = None

    def finish(self) -> None:
        """`running` is over; the rest of its body is ignored."""
        if self._arriving is self.running:
            self._arriving = None
        self.running = None

    def start_next(self) -> None:
        if self._waiting:
            self._start(self._waiting.popleft())
        if not self._waiting:
            self._connection.resume_reading()

    def forget_waiting(self) -> None:
        self._waiting.clear()

    def _start(self, request: Request) -> None:
        self.running = request
        self._connection.start(request)
