"""What has come from one client and is not understood yet.

A read brings up to 256 KiB, and there may be many of them in one turn of the event loop. Some bytes cost far more to
understand than to send: requests ahead of their answers, chunks and frames with next to nothing in them. So they are
parsed a slice at a time, and each connection for a moment only: then it is everybody else's turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

SLICE_BYTES = 8 * 1024
TURN_S = 0.001  # of parsing, for one connection in one turn of the loop


class Incoming:
    def __init__(self, parse: Callable[[bytes | memoryview], None]) -> None:
        """`parse` takes what comes, in order; it may call `hold` and `drop`."""
        self.transport: asyncio.Transport | None = None
        self._parse = parse
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[memoryview] = deque()
        self._is_held = False
        self._is_reading = True
        self._spent_s = 0.0  # in this turn of the loop
        self._is_counting = False  # that turn's end will be noticed

    def take(self, data: bytes) -> None:
        if len(data) <= SLICE_BYTES and not self._waiting and not self._is_held:
            self._parse(data)
            return
        self._waiting.append(memoryview(data))
        self._count_turn()
        self._go_on()

    def hold(self) -> None:
        """Parse no more, and read no more, until `release`. What has been read waits."""
        self._is_held = True
        self._read(False)

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._count_turn()
            self._read(not self._waiting)

    def drop(self) -> None:
        """Whatever waits is of no use. Reading goes on, for whoever sends must get to our last words."""
        self._waiting.clear()
        self._read(True)
        self.transport = None

    def _count_turn(self) -> None:
        if not self._is_counting:
            self._is_counting = True
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_counting = False
        self._spent_s = 0.0
        if self._waiting:
            self._count_turn()
            self._go_on()

    def _go_on(self) -> None:
        started = time.monotonic()
        while self._waiting and not self._is_held and self._spent_s < TURN_S:
            first = self._waiting.popleft()
            if len(first) > SLICE_BYTES:
                self._waiting.appendleft(first[SLICE_BYTES:])
            self._parse(first[:SLICE_BYTES])
            now = time.monotonic()
            self._spent_s += now - started
            started = now
        self._read(not self._waiting and not self._is_held)

    def _read(self, wanted: bool) -> None:
        if self.transport is None or self._is_reading == wanted or self.transport.is_closing():
            return
        self._is_reading = wanted
        if wanted:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()
