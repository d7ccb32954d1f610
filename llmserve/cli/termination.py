"""A terminated command unwinds its stack, as with Ctrl-C, so that it leaves nothing incomplete."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

NUMBERS = (signal.SIGTERM, signal.SIGHUP)


class EndPastThreads:
    """Ends the process after all other exit handlers if threads are left, because a model may still be loading. The
    interpreter would stop each thread when it next waits for the GIL. A thread that is stopped within native code
    aborts the process."""

    def __init__(self) -> None:
        self.code: int | None = None  # exit code; None: the process ends by an exception
        atexit.register(self)

    def __call__(self) -> None:
        if self.code is None or threading.active_count() == 1:
            return
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # it has no reader, or is closed
                stream.flush()
        os._exit(self.code)


@contextmanager
def terminated_as_exception() -> Iterator[None]:
    """Inside the block, NUMBERS raise `SystemExit` with a shell's exit code; ignored signals stay ignored."""

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    previous = {number: signal.getsignal(number) for number in NUMBERS}
    chosen = [number for number, handler in previous.items() if handler is not signal.SIG_IGN]
    try:
        for number in chosen:
            signal.signal(number, terminate)
        yield
    finally:
        for number in chosen:
            signal.signal(number, previous[number])
