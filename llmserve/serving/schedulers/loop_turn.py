"""How long the event loop has been busy with what runs inline, so that it comes back to everything else in time."""

from __future__ import annotations

import asyncio
import time

MAX_TURN_NS = 5_000_000


class LoopTurn:
    """How long the loop has been running what was due together. One for all models of a server."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # in whose turn we are; None: none that we know of
        self._began_ns = 0

    def is_over(self) -> bool:
        """Whether others are to have the loop before anything more is executed on it: sockets, timers, threads."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._began_ns = loop, time.monotonic_ns()
            loop.call_soon(self._end)
            return False
        return time.monotonic_ns() - self._began_ns > MAX_TURN_NS

    def _end(self) -> None:
        self._loop = None
