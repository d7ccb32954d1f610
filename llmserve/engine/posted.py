"""Work for the step thread that must not run during a step. Guarded by the engine's lock."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeAlias

from llmserve.errors import Unavailable


class _Task(NamedTuple):
    run: Callable[[], None]
    done: Future[None]


Post: TypeAlias = Callable[[Callable[[], None]], Future[None]]


class Posted:
    def __init__(self) -> None:
        self._tasks: list[_Task] = []

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def add(self, run: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        self._tasks.append(_Task(run, done))
        return done

    def take(self) -> Posted:
        taken = Posted()
        taken._tasks, self._tasks = self._tasks, []
        return taken

    def run(self) -> None:
        """Run all of it, in order; each caller gets its own error."""
        for task in self._tasks:
            try:
                task.run()
            except Exception as error:  # the border to the caller that posted it
                task.done.set_exception(error)
            else:
                task.done.set_result(None)

    def refuse(self) -> None:
        """The engine has ended."""
        for task in self._tasks:
            task.done.set_exception(Unavailable("the engine has been closed"))
