"""`llmserve`, whose event loop measures how long it is busy at a time.

    HOSTILE_LOOP=FILE python -m tests.hostile.measured serve ...

FILE: a float64, the most processor time in seconds that the loop's thread has spent in one turn, between two looks at
its sockets. Other programs take none of it. Whoever writes 0 there begins anew.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import time
from pathlib import Path

import uvloop

PAUSE_S = 0.002  # between two turns that are measured; longer turns follow each other, so every second one is

new_event_loop = uvloop.new_event_loop
MOST = struct.Struct("d")


class MeasuredTurns:
    def __init__(self, loop: asyncio.AbstractEventLoop, path: Path) -> None:
        self._loop = loop
        with path.open("r+b") as file:
            self._most = mmap.mmap(file.fileno(), MOST.size)
        self._began = 0.0
        loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._began = time.thread_time()
        self._loop.call_soon(self._end)  # in the next turn

    def _end(self) -> None:
        spent = time.thread_time() - self._began
        if spent > MOST.unpack(self._most[:])[0]:
            self._most[:] = MOST.pack(spent)
        self._loop.call_later(PAUSE_S, self._begin)


def measured_loop() -> uvloop.Loop:
    loop = new_event_loop()
    MeasuredTurns(loop, Path(os.environ["HOSTILE_LOOP"]))
    return loop


def main() -> None:
    uvloop.new_event_loop = measured_loop
    from llmserve.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
