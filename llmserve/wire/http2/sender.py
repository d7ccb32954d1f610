"""What goes out on one connection: control frames at once, data as the client's windows and its reading allow.

What is written in one turn of the event loop goes out in one piece.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Protocol

from llmserve.wire.http2 import frames
from llmserve.wire.http2.frames import ConnectionFailed, frame

MAX_UNREAD_BYTES = 4 * 1024 * 1024  # of answers that no window holds back: to pings, to settings, statuses


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
        self.max_frame = frames.DEFAULT_MAX_FRAME
        self.is_paused = False  # the client reads too slowly
        self._loop = loop
        self._window = frames.DEFAULT_WINDOW  # bytes that the client lets us send, all calls together
        self._outgoing: list[bytes] = []
        self._num_unread = 0
        self._is_finished = False
        self._waiting: list[asyncio.Future[None]] = []

    def write(self, data: bytes) -> None:
        if not self._outgoing:
            self._loop.call_soon(self.flush)
        self._outgoing.append(data)
        if self.is_paused:
            self._num_unread += len(data)

    def check_read(self) -> None:
        """A client may not ask without end for what it does not read."""
        if self._num_unread > MAX_UNREAD_BYTES:
            raise ConnectionFailed(frames.ENHANCE_YOUR_CALM, "answers are not read")

    def flush(self) -> None:
        if self._outgoing and self.transport is not None and not self._is_finished:
            self.transport.write(b"".join(self._outgoing))
        self._outgoing.clear()

    def finish(self) -> None:
        """Nothing more comes. What the client still sends is read: to close on it would take back our last words."""
        self.flush()
        self._is_finished = True
        if self.transport is not None and self.transport.can_write_eof():
            with suppress(OSError):  # the client was faster
                self.transport.write_eof()
        elif self.transport is not None:
            self.transport.close()

    async def send(self, call: Outlet, head: bytes, data: bytes | memoryview, tail: bytes) -> None:
        """`head`, DATA and `tail`; returns when the connection has taken them. `CallClosed` when the call is over."""
        size = len(data)
        if not self.is_paused and size <= call.send_window and size <= self._window and size <= self.max_frame:
            call.send_window -= size
            self._window -= size
            self.write(head + frame(frames.DATA, 0, call.stream, data) + tail)
            return
        self.write(head)
        await self._send_in_pieces(call, data)
        self.write(tail)

    async def _send_in_pieces(self, call: Outlet, data: bytes | memoryview) -> None:
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
            self.write(frame(frames.DATA, 0, call.stream, piece))
            self.flush()  # which may pause us

    async def _wait(self) -> None:
        waiter = self._loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def open_window(self, increment: int) -> None:
        self._window += increment
        if self._window > frames.LARGEST_WINDOW:
            raise ConnectionFailed(frames.FLOW_CONTROL_ERROR, "the connection's window is too large")
        self.wake()

    def resume(self) -> None:
        self.is_paused = False
        self._num_unread = 0
        self.wake()

    def wake(self) -> None:
        """A window has opened: those who wait look again."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
