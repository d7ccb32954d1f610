"""A thread that runs during a build, for data that must be read from beginning to end: digests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Event
from types import TracebackType
from typing import Generic, Self, TypeAlias, TypeVar

from llmserve.progress import Progress

POLL_S = 0.2

T = TypeVar("T")
Advance: TypeAlias = Callable[[str, int], None]


class Stopped(Exception):
    """The build ended before the work was done."""


class Pending(Generic[T]):
    """Work that was started, and its progress."""

    def __init__(self, stopped: Event) -> None:
        self._stopped = stopped
        self._done: tuple[str, int] = ("", 0)
        self.future: Future[T]

    def advance(self, what: str, num_bytes: int) -> None:
        """Report progress; called by the work in its own thread. Raises `Stopped`."""
        if self._stopped.is_set():
            raise Stopped
        self._done = what, self._done[1] + num_bytes

    def result(self, progress: Progress) -> T:
        """Return the work's result or raise its error; until then, report to `progress` what is done."""
        told, finished = 0, False
        while not finished:
            finished = bool(wait([self.future], POLL_S).done)
            what, done = self._done
            progress.advance(what, done - told)
            told = done
        return self.future.result()


class Background:
    """Runs work in order, one after the other. Leaving the context stops it."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "background")
        self._stopped = Event()

    def start(self, work: Callable[[Advance], T]) -> Pending[T]:
        pending = Pending[T](self._stopped)
        pending.future = self._executor.submit(work, pending.advance)
        return pending

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._executor.shutdown(cancel_futures=True)
