"""Deadlines of calls: one timer per connection, however many of its calls expire at the same moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from heapq import heapify, heappop, heappush

from llmserve.wire.turns import EACH_BEGUN, Turns

SPARE = 64  # entries of ended calls that may be kept before they are removed


class Expiry:
    def __init__(self, open_streams: Collection[int], end: Callable[[int], None]) -> None:
        """`end` is called with the stream of a call that is still open at its deadline."""
        self._open = open_streams
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._turns = Turns.here()
        self._due: list[tuple[float, int]] = []  # a heap: when, stream
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: int, seconds: float) -> None:
        if len(self._due) > 2 * len(self._open) + SPARE:
            self._due = [entry for entry in self._due if entry[1] in self._open]
            heapify(self._due)
        entry = (self._loop.time() + seconds, stream)
        heappush(self._due, entry)
        if self._due[0] is entry:
            self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def go_on(self) -> None:
        """End a few expired calls per turn, because each one ends a task."""
        for _ in range(EACH_BEGUN):
            if self._turns.is_over:
                break
            if (stream := self._next()) is None:
                self._arm()
                return
            self._turns.begin()
            self._end(stream)
        self._turns.wait(self)

    def _next(self) -> int | None:
        now = self._loop.time()
        while self._due and self._due[0][0] <= now:
            _, stream = heappop(self._due)
            if stream in self._open:
                return stream
        return None

    def _arm(self) -> None:
        self.stop()
        if self._due:
            self._timer = self._loop.call_at(self._due[0][0], self._turns.wait, self)
