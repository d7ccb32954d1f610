"""`Progress` on standard error: drawn on a terminal, told in lines where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

INTERVAL_S = 5.0  # between two lines of a phase
LEAST_TIMED_S = 1.0
MB = 10**6


def shown_progress() -> ProgressBar | ProgressLines:
    """What suits this process's standard error."""
    return ProgressBar() if sys.stderr.isatty() else ProgressLines(sys.stderr)


class ProgressBar:
    """`Progress`, drawn on the terminal (standard error); one line per phase."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description:<20}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, TextColumn("{task.fields[what]}"), console=Console(stderr=True))
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._task is None:
            return  # refused before the first phase: nothing was drawn
        if error[0] is None:
            self._finish_phase()
        self._bar.stop()

    def phase(self, name: str, total_bytes: int) -> None:
        self._bar.start()
        self._finish_phase()
        self._task = self._bar.add_task(name, total=total_bytes, what="")

    def advance(self, what: str, num_bytes: int) -> None:
        assert self._task is not None
        self._bar.update(self._task, advance=num_bytes, what=what)

    def _finish_phase(self) -> None:
        if self._task is not None:
            done = self._bar.tasks[self._task].completed
            self._bar.update(self._task, total=max(done, 1), completed=max(done, 1), what="")


class ProgressLines:
    """A line every few seconds, and one for each phase that is finished: what, how much of it, how fast."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._phase = ""
        self._total = self._done = 0
        self._began = self._told = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._finish_phase()

    def phase(self, name: str, total_bytes: int) -> None:
        self._finish_phase()
        self._phase, self._total, self._done = name, total_bytes, 0
        self._began = self._told = self._clock()

    def advance(self, what: str, num_bytes: int) -> None:
        self._done += num_bytes
        now = self._clock()
        if now - self._told >= INTERVAL_S:
            self._told = now
            elapsed = now - self._began
            share = self._done / max(1, self._total)
            self._say(
                f"{share:4.0%}, {self._done / MB:,.0f} of {self._total / MB:,.0f} MB, "
                f"{self._done / MB / elapsed:,.0f} MB/s, {what}"
            )

    def _finish_phase(self) -> None:
        if self._phase:
            elapsed = self._clock() - self._began
            size = f", {self._done / MB:,.0f} MB" if elapsed >= LEAST_TIMED_S else ""  # no speed: it was there already
            self._say(f"done{size} in {elapsed:.1f} s")

    def _say(self, text: str) -> None:
        print(f"{self._phase}: {text}", file=self._stream, flush=True)
