"""Hidden rows from the engine that the draft model has not read yet."""

from __future__ import annotations

import numpy as np

from llmserve.scheduler.plan import HiddenRows

MAX_PENDING = 64  # rows per sequence; with more, the model reads them even if it does not draft


class PendingRows:
    """The rows of one sequence, for its tokens from `begin` to `end`."""

    def __init__(self, begin: int) -> None:
        self.begin = self.end = begin
        self._pieces: list[HiddenRows] = []

    def __len__(self) -> int:
        return self.end - self.begin

    def cut(self, end: int) -> None:
        """Drop the rows from `end` on, which belong to rejected drafts."""
        while self.end > max(end, self.begin):
            last = self._pieces.pop()
            self.end -= len(last)
            if self.end < end:
                self._append(last[: end - self.end])

    def add(self, rows: HiddenRows, start: int) -> None:
        """Add rows for tokens from `start` on. Rows for tokens before `end` are skipped."""
        assert start <= self.end, "rows are missing"
        if len(rows) > self.end - start:
            self._append(rows[self.end - start :].copy())

    def first(self, count: int) -> HiddenRows:
        found: HiddenRows = np.concatenate(self._pieces)[:count]
        return found

    def read(self, count: int) -> None:
        """Drop the first `count` rows, which the model has read."""
        rest = self.first(len(self))[count:]
        self.begin += count
        self.end, self._pieces = self.begin, []
        if len(rest):
            self._append(rest)

    def _append(self, rows: HiddenRows) -> None:
        self._pieces.append(rows)
        self.end += len(rows)
