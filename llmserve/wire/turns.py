"""Limits the work that all connections together do in one turn of the event loop.

They may parse for a few milliseconds, and start and end a number of tasks, which run in the next turn. Other work
waits for a later turn, connection by connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import ClassVar, Protocol
from weakref import WeakKeyDictionary

ALL_TURN_S = 0.005  # of parsing
MAX_BEGUN = 64  # tasks that are started or ended in one turn: a small call takes 0.1 to 0.3 ms
EACH_BEGUN = 16  # for one connection that has waited


class Due(Protocol):
    def go_on(self) -> None:
        """Continue in a turn that it has waited for."""
        ...


class Turns:
    """The turns of one event loop: connections that wait for one, and the work done in the current turn."""

    _of_loops: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, Turns]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.number = 0
        self._spent_s = 0.0
        self._num_begun = 0
        self._due: deque[Due] = deque()  # the longest waiting comes first
        self._is_counting = False  # `_next` is scheduled

    @classmethod
    def here(cls) -> Turns:
        return cls._of_loops.setdefault(asyncio.get_running_loop(), cls())

    @property
    def is_over(self) -> bool:
        return self._spent_s >= ALL_TURN_S or self._num_begun >= MAX_BEGUN

    def spend(self, seconds: float) -> None:
        self._spent_s += seconds
        self._count()

    def begin(self) -> None:
        """Count a task that is started or ended."""
        self._num_begun += 1
        self._count()

    def wait(self, due: Due) -> None:
        self._due.append(due)
        self._count()

    def _count(self) -> None:
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_counting = False
        self.number += 1
        self._spent_s, self._num_begun = 0.0, 0
        for _ in range(len(self._due)):
            if self.is_over:
                break
            self._due.popleft().go_on()
        if self._due:
            self._count()


class Pace:
    """Starts and ends the tasks of one connection: at once while the turn has room, else later, in order."""

    def __init__(self, hold: Callable[[], None], release: Callable[[], None]) -> None:
        """While an action waits, the connection is held, so that it adds no more."""
        self._hold = hold
        self._release = release
        self._turns = Turns.here()
        self._waiting: deque[Callable[[], None]] = deque()

    def do(self, act: Callable[[], None]) -> None:
        if not self._waiting and not self._turns.is_over:
            self._turns.begin()
            act()
            return
        if not self._waiting:
            self._turns.wait(self)
            self._hold()
        self._waiting.append(act)

    def go_on(self) -> None:
        for _ in range(EACH_BEGUN):
            if not self._waiting or self._turns.is_over:
                break
            self._turns.begin()
            self._waiting.popleft()()
        if self._waiting:
            self._turns.wait(self)
        else:
            self._release()
