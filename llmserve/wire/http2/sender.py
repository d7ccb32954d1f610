"""Sends the frames of one connection: control frames at once, data as the client's windows and reading allow.

Frames written in one turn of the event loop are sent in one piece. A call that may not send waits for its own window,
or in a queue for the connection's window. An opened window wakes one call that can use it, not all of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Protocol

from grpc import StatusCode

from llmserve.wire.http2 import frames
from llmserve.wire.http2.frames import ConnectionFailed, frame
from llmserve.wire.http2.messages import BadMessage
from llmserve.wire.request_memory import UNREAD_TIMEOUT_S

MAX_UNREAD_BYTES = 4 * 1024 * 1024  # of answers that no window limits: to pings, to settings, statuses


class CallClosed(Exception):
    """The call is over: nobody reads its data any more."""


class Outlet(Protocol):
    """A call, as its sender sees it."""

    stream: int
    send_window: int

    @property
    def is_closed(self) -> bool: ...


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
        self._stalled: dict[int, asyncio.Future[None]] = {}  # by stream: calls whose own window is closed
        self._queue: deque[asyncio.Future[None]] = deque()  # other calls that wait

    def write(self, data: bytes) -> None:
        if not self._outgoing:
            self._loop.call_soon(self.flush)
        self._outgoing.append(data)
        if self.is_paused:
            self._num_unread += len(data)

    def check_read(self) -> None:
        """Fail the connection if the client keeps asking without reading the answers."""
        if self._num_unread > MAX_UNREAD_BYTES:
            raise ConnectionFailed(frames.ENHANCE_YOUR_CALM, "the client does not read responses")

    def flush(self) -> None:
        if self._outgoing and self.transport is not None and not self._is_finished:
            self.transport.write(b"".join(self._outgoing))
        self._outgoing.clear()

    def finish(self) -> None:
        """Send pending frames, then no more. Reading continues: a close with unread data would discard them."""
        self.flush()
        self._is_finished = True
        if self.transport is not None and self.transport.can_write_eof():
            with suppress(OSError):  # the client was faster
                self.transport.write_eof()
        elif self.transport is not None:
            self.transport.close()

    async def send(self, call: Outlet, head: bytes, data: bytes | memoryview, tail: bytes) -> None:
        """Send `head`, DATA, `tail`; returns when the connection has them. Raises `CallClosed` if the call is over."""
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
        try:
            while offset < len(data):
                room = 0 if self.is_paused else min(call.send_window, self._window, self.max_frame)
                if room <= 0:
                    await self._wait(call)
                    if call.is_closed:
                        raise CallClosed
                    continue
                piece = data[offset : offset + room]
                offset += len(piece)
                call.send_window -= len(piece)
                self._window -= len(piece)
                self.write(frame(frames.DATA, 0, call.stream, piece))
                self.flush()  # may set `is_paused`
        finally:
            self._wake_next()  # it may use the rest of the window, however this call has ended

    async def _wait(self, call: Outlet) -> None:
        """Wait until the call may send. Raises `BadMessage` if that takes too long."""
        waiter = self._loop.create_future()
        timer = self._loop.call_later(UNREAD_TIMEOUT_S, _give_up, waiter)
        if call.send_window > 0:
            self._queue.append(waiter)
        else:
            self._stalled[call.stream] = waiter
            self._wake_next()
        try:
            await waiter
        finally:
            timer.cancel()
            self._stalled.pop(call.stream, None)

    def open_window(self, increment: int) -> None:
        self._window += increment
        if self._window > frames.LARGEST_WINDOW:
            raise ConnectionFailed(frames.FLOW_CONTROL_ERROR, "the connection's window is too large")
        self._wake_next()

    def resume(self) -> None:
        self.is_paused = False
        self._num_unread = 0
        self._wake_next()

    def wake(self, stream: int) -> None:
        """Wake the call of a stream: its window has changed."""
        waiter = self._stalled.get(stream)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def wake_stalled(self) -> None:
        """Wake all stalled calls: all windows have changed."""
        for stream in self._stalled:
            self.wake(stream)

    def _wake_next(self) -> None:
        while self._queue and self._window > 0 and not self.is_paused:
            waiter = self._queue.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return


def _give_up(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        text = f"the client has read nothing of the response for {UNREAD_TIMEOUT_S:g} seconds"
        waiter.set_exception(BadMessage(StatusCode.DEADLINE_EXCEEDED, text))
