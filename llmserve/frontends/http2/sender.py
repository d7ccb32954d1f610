"""What goes out on one connection: control frames at once, data as the client's windows and its reading allow.

What is written in one turn of the event loop goes out in one piece.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from llmserve.frontends.http2 import frames as h2
from llmserve.frontends.http2.frames import ConnectionFailed, frame

MAX_UNREAD_BYTES = 1024 * 1024  # of answers to pings and settings


class CallClosed(Exception):
    """Nobody reads what is written any more."""


class Outlet(Protocol):
    """A call, as far as its data goes out."""

    stream: int
    send_window: int
    is_closed: bool


class Sender:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.transport: asyncio.Transport | None = None
        self.max_frame = h2.DEFAULT_MAX_FRAME
        self.is_paused = False  # the client reads too slowly
        self._loop = loop
        self._window = h2.DEFAULT_WINDOW  # bytes that the client lets us send, all calls together
        self._outgoing: list[bytes] = []
        self._num_unread = 0
        self._waiting: list[asyncio.Future[None]] = []

    def write(self, data: bytes) -> None:
        if not self._outgoing:
            self._loop.call_soon(self.flush)
        self._outgoing.append(data)

    def write_answer(self, data: bytes) -> None:
        """To what a client may send without end and without reading."""
        if self.is_paused:
            self._num_unread += len(data)
            if self._num_unread > MAX_UNREAD_BYTES:
                raise ConnectionFailed(h2.ENHANCE_YOUR_CALM, "answers to pings and settings are not read")
        self.write(data)

    def flush(self) -> None:
        if self._outgoing and self.transport is not None:
            self.transport.write(b"".join(self._outgoing))
        self._outgoing.clear()

    async def send(self, call: Outlet, head: bytes, data: bytes, tail: bytes) -> None:
        """`head`, DATA and `tail`; returns when the connection has taken them. `CallClosed` when the call is over."""
        size = len(data)
        if not self.is_paused and size <= call.send_window and size <= self._window and size <= self.max_frame:
            call.send_window -= size
            self._window -= size
            self.write(head + frame(h2.DATA, 0, call.stream, data) + tail)
            return
        self.write(head)
        await self._send_in_pieces(call, data)
        self.write(tail)

    async def _send_in_pieces(self, call: Outlet, data: bytes) -> None:
        offset = 0
        while offset < len(data):
            room = 0 if self.is_paused else min(call.send_window, self._window, self.max_frame)
            if room <= 0:
                await self._wait()
                if call.is_closed:
                    raise CallClosed
                continue
            piece = data[offset : offset + room]
            offset += len(piece)
            call.send_window -= len(piece)
            self._window -= len(piece)
            self.write(frame(h2.DATA, 0, call.stream, piece))
            self.flush()  # which may pause us

    async def _wait(self) -> None:
        waiter = self._loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def open_window(self, increment: int) -> None:
        self._window += increment
        if self._window > h2.LARGEST_WINDOW:
            raise ConnectionFailed(h2.FLOW_CONTROL_ERROR, "the connection's window is too large")
        self.wake()

    def resume(self) -> None:
        self.is_paused = False
        self._num_unread = 0
        self.wake()

    def wake(self) -> None:
        """A window has opened, or a call has closed: those who wait look again."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
