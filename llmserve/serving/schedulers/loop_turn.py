"""Limits how long the event loop executes requests inline before it runs other work."""

from __future__ import annotations

import asyncio
import time

MAX_TURN_NS = 5_000_000


class LoopTurn:
    """Measures the current turn of the loop, in which it runs all due callbacks. One for all models of a server."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # whose turn is being measured; None: no turn is
        self._began_ns = 0

    def is_over(self) -> bool:
        """Whether other work (sockets, timers, threads) must run before anything more is executed inline."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._began_ns = loop, time.monotonic_ns()
            loop.call_soon(self._end)
            return False
        return time.monotonic_ns() - self._began_ns > MAX_TURN_NS

    def _end(self) -> None:
        self._loop = None
