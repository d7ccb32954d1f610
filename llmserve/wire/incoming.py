"""What has come from one client and is not understood yet.

A read brings up to 256 KiB, and there may be many of them in one turn of the event loop. Some bytes cost far more to
understand than to send: requests ahead of their answers, chunks and frames with next to nothing in them. And there may
be many clients. So bytes are parsed a slice at a time, those of a connection for a moment and those of all connections
for a few: then it is everybody else's turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from llmserve.wire.turns import Turns

SLICE_BYTES = 8 * 1024
TURN_S = 0.001  # of parsing, for one connection in one turn of the loop


class Incoming:
    def __init__(self, parse: Callable[[bytes | memoryview], None]) -> None:
        """`parse` takes what comes, in order; it may call `hold` and `drop`."""
        self.transport: asyncio.Transport | None = None
        self._parse = parse
        self._turns = Turns.here()
        self._waiting: deque[memoryview] = deque()
        self._is_held = False
        self._is_reading = True
        self._is_due = False
        self._turn = 0  # that it has last parsed in
        self._spent_s = 0.0  # in that turn

    def take(self, data: bytes) -> None:
        if len(data) <= SLICE_BYTES and not self._waiting and not self._is_held and not self._turns.is_over:
            started = time.monotonic()
            self._parse(data)
            self._turns.spend(time.monotonic() - started)
            return
        self._waiting.append(memoryview(data))
        if not self._is_due:
            self._work()

    def hold(self) -> None:
        """Parse no more, and read no more, until `release`. What has been read waits."""
        self._is_held = True
        self._read(False)

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._wait()
            self._read(not self._waiting)

    def go_on(self) -> None:
        """In a turn that it has waited for."""
        self._is_due = False
        self._work()

    def drop(self) -> None:
        """Whatever waits is of no use. Reading goes on, for whoever sends must get to our last words."""
        self._waiting.clear()
        self._read(True)
        self.transport = None

    def _wait(self) -> None:
        if self._waiting and not self._is_held and not self._is_due:
            self._is_due = True
            self._turns.wait(self)

    def _work(self) -> None:
        if self._turn != self._turns.number:
            self._turn, self._spent_s = self._turns.number, 0.0
        started = time.monotonic()
        while self._waiting and not self._is_held and self._spent_s < TURN_S and not self._turns.is_over:
            first = self._waiting.popleft()
            if len(first) > SLICE_BYTES:
                self._waiting.appendleft(first[SLICE_BYTES:])
            self._parse(first[:SLICE_BYTES])
            now = time.monotonic()
            self._spent_s += now - started
            self._turns.spend(now - started)
            started = now
        self._wait()
        self._read(not self._waiting and not self._is_held)

    def _read(self, wanted: bool) -> None:
        if self.transport is None or self._is_reading == wanted or self.transport.is_closing():
            return
        self._is_reading = wanted
        if wanted:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()
