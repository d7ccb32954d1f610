"""Received bytes of one client that are not parsed yet.

A read returns up to 256 KiB, and there may be many reads in one turn of the event loop. Some bytes cost far more to
parse than to send: requests sent ahead of their answers, chunks and frames with almost no data. And there may be many
clients. So bytes are parsed in slices, with a time limit per turn for each connection, and one for all connections
together (`turns.py`). Then other work runs.
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
        """`parse` is called with the bytes in order; it may call `hold` and `drop`."""
        self.transport: asyncio.Transport | None = None
        self._parse = parse
        self._turns = Turns.here()
        self._waiting: deque[memoryview] = deque()
        self._is_held = False
        self._is_reading = True
        self._is_due = False
        self._turn = 0  # the turn in which it last parsed
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
        """Stop parsing and reading until `release`. Bytes already read wait."""
        self._is_held = True
        self._read(False)

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._wait()
            self._read(not self._waiting)

    def go_on(self) -> None:
        """Continue in a turn that it has waited for."""
        self._is_due = False
        self._work()

    def drop(self) -> None:
        """Discard waiting bytes. Reading continues: a client that still sends must get to read our last bytes."""
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
