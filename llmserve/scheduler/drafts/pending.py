"""Hidden rows that the engine has handed out, and that a model which drafts with them has not read yet."""

from __future__ import annotations

import numpy as np

from llmserve.scheduler.plan import HiddenRows

MAX_PENDING = 64  # rows of a sequence, until they are read whether it is drafted for or not


class PendingRows:
    """Of one sequence: of its tokens from `begin` up to `end`."""

    def __init__(self, begin: int) -> None:
        self.begin = self.end = begin
        self._pieces: list[HiddenRows] = []

    def __len__(self) -> int:
        return self.end - self.begin

    def cut(self, end: int) -> None:
        """Forget those from `end` on: of drafts that were not drawn."""
        while self.end > max(end, self.begin):
            last = self._pieces.pop()
            self.end -= len(last)
            if self.end < end:
                self._append(last[: end - self.end])

    def add(self, rows: HiddenRows, start: int) -> None:
        """Of tokens from `start` on. Those that are here, or were, are left out."""
        assert start <= self.end, "rows are missing"
        if len(rows) > self.end - start:
            self._append(rows[self.end - start :].copy())

    def first(self, count: int) -> HiddenRows:
        found: HiddenRows = np.concatenate(self._pieces)[:count]
        return found

    def read(self, count: int) -> None:
        """The first `count` are not needed any more."""
        rest = self.first(len(self))[count:]
        self.begin += count
        self.end, self._pieces = self.begin, []
        if len(rest):
            self._append(rest)

    def _append(self, rows: HiddenRows) -> None:
        self._pieces.append(rows)
        self.end += len(rows)
