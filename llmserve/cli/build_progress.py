"""`Progress` on standard error: a bar on a terminal, lines of text otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from llmserve.progress import Phase

INTERVAL_S = 5.0  # between two lines of a phase
LEAST_TIMED_S = 1.0
MB = 10**6
GUESSED_SHARE = 0.1  # of a build: after that, its speed here counts more than elsewhere


def shown_progress() -> ProgressBar | ProgressLines:
    """The form that suits this process's standard error."""
    return ProgressBar() if sys.stderr.isatty() else ProgressLines(sys.stderr)


class Estimate:
    """Number of the current phase, and time left: the phases' times elsewhere, scaled by the speed so far."""

    def __init__(self, phases: Sequence[Phase] = ()) -> None:
        self._names = [phase.name for phase in phases]
        self._seconds = [phase.seconds for phase in phases]

    def title(self, name: str) -> str:
        return f"{name} ({self._names.index(name) + 1} of {len(self._names)})" if name in self._names else name

    def time_left(self, name: str, share: float, elapsed: float) -> str:
        """As text, if `share` of the phase `name` is done after `elapsed` seconds; empty if unknown."""
        seconds = self.seconds_left(name, share, elapsed)
        if seconds is None:
            return ""
        return f"about {max(1.0, seconds):.0f} s left" if seconds < 90 else f"about {seconds / 60:.0f} min left"

    def seconds_left(self, name: str, share: float, elapsed: float) -> float | None:
        if name not in self._names:
            return None
        index, total = self._names.index(name), sum(self._seconds)
        done = sum(self._seconds[:index]) + min(1.0, share) * self._seconds[index]
        guessed = GUESSED_SHARE * total
        return (total - done) * (elapsed + guessed) / (done + guessed)


class ProgressBar:
    """`Progress`, drawn on the terminal (standard error); one line per phase."""

    def __init__(self) -> None:
        where = (TextColumn("{task.description:<28}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        rest = (TextColumn("{task.fields[left]}"), TextColumn("{task.fields[what]}"))
        self._bar = Progress(*where, *rest, console=Console(stderr=True))
        self._task: TaskID | None = None
        self._phase, self._estimate, self._began = "", Estimate(), time.monotonic()

    def expect(self, phases: Sequence[Phase]) -> None:
        self._estimate, self._began = Estimate(phases), time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._task is None:
            return  # an error before the first phase: nothing was drawn
        if error[0] is None:
            self._finish_phase()
        self._bar.stop()

    def phase(self, name: str, total_bytes: int) -> None:
        self._bar.start()
        self._finish_phase()
        self._phase = name
        self._task = self._bar.add_task(self._estimate.title(name), total=total_bytes, what="", left="")

    def advance(self, what: str, num_bytes: int) -> None:
        assert self._task is not None
        task = self._bar.tasks[self._task]
        share = (task.completed + num_bytes) / (task.total or 1)
        left = self._estimate.time_left(self._phase, share, time.monotonic() - self._began)
        self._bar.update(self._task, advance=num_bytes, what=what, left=left)

    def _finish_phase(self) -> None:
        if self._task is not None:
            done = self._bar.tasks[self._task].completed
            self._bar.update(self._task, total=max(done, 1), completed=max(done, 1), what="", left="")


class ProgressLines:
    """A line every few seconds, and one for each finished phase, with amount, speed and time."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._phase = ""
        self._total = self._done = 0
        self._began = self._told = 0.0
        self._estimate, self._all_began = Estimate(), clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._finish_phase()

    def expect(self, phases: Sequence[Phase]) -> None:
        self._estimate, self._all_began = Estimate(phases), self._clock()

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
            left = self._estimate.time_left(self._phase, share, now - self._all_began)
            self._say(
                f"{share:4.0%}, {self._done / MB:,.0f} of {self._total / MB:,.0f} MB, "
                f"{self._done / MB / elapsed:,.0f} MB/s, {what}{left and ', ' + left}"
            )

    def _finish_phase(self) -> None:
        if self._phase:
            elapsed = self._clock() - self._began
            size = f", {self._done / MB:,.0f} MB" if elapsed >= LEAST_TIMED_S else ""  # too short to measure
            self._say(f"done{size} in {elapsed:.1f} s")

    def _say(self, text: str) -> None:
        print(f"{self._estimate.title(self._phase)}: {text}", file=self._stream, flush=True)
