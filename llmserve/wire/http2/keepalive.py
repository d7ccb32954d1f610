"""Limits on a connection's silence and age."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

AGE_JITTER = 0.1  # so that clients that connected together do not reconnect together


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """tritonserver's limits and defaults, in seconds. 0: no limit."""

    ping_after_s: float = 7200.0  # of silence
    ping_timeout_s: float = 20.0
    pings_without_calls: bool = False
    max_age_s: float = 0.0
    max_age_grace_s: float = 0.0  # for calls to end


class Watched(Protocol):
    """A connection, as `Keepalive` sees it."""

    @property
    def has_calls(self) -> bool: ...
    def ping(self) -> None: ...
    def leave(self) -> None: ...
    def abort(self, reason: str = "") -> None: ...


class Keepalive:
    """Pings silent clients, and closes connections that do not answer or that have reached their maximum age."""

    def __init__(self, limits: ConnectionLimits, connection: Watched) -> None:
        self._limits = limits
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        if limits.ping_after_s:
            self._after(limits.ping_after_s, "silence", self._look)
        if limits.max_age_s:
            age = limits.max_age_s * random.uniform(1 - AGE_JITTER, 1 + AGE_JITTER)
            self._after(age, "age", self._leave)

    def heard(self) -> None:
        self._heard_at = self._loop.time()

    def stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def _after(self, seconds: float, name: str, act: Callable[[], None]) -> None:
        self._timers[name] = self._loop.call_later(seconds, act)

    def _look(self) -> None:
        limits, silent_s = self._limits, self._loop.time() - self._heard_at
        if silent_s < limits.ping_after_s:
            self._after(limits.ping_after_s - silent_s, "silence", self._look)
        elif not (self._connection.has_calls or limits.pings_without_calls):
            self._after(limits.ping_after_s, "silence", self._look)
        else:
            asked_at = self._loop.time()
            self._connection.ping()
            self._after(limits.ping_timeout_s, "silence", lambda: self._expect(asked_at))

    def _expect(self, asked_at: float) -> None:
        if self._heard_at >= asked_at:  # uvloop's clock counts milliseconds, and an answer may take less
            self._look()
        else:
            self._connection.abort("the client does not answer pings")

    def _leave(self) -> None:
        self._connection.leave()
        if self._limits.max_age_grace_s:
            reason = "the connection has reached its maximum age"
            self._after(self._limits.max_age_grace_s, "age", lambda: self._connection.abort(reason))
