"""A command that is told to end unwinds its stack, as with Ctrl-C, so that nothing half-done is left."""

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
    """Ends the process when everything that is registered for its end is done, if threads are left that nobody joins: a
    model may still be loading. The interpreter would stop each where it next waits for it, and a thread that is
    stopped within native code aborts the process."""

    def __init__(self) -> None:
        self.code: int | None = None  # of the process; None: it ends by an exception
        atexit.register(self)

    def __call__(self) -> None:
        if self.code is None or threading.active_count() == 1:
            return
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody reads it, or it is closed
                stream.flush()
        os._exit(self.code)


@contextmanager
def terminated_as_exception() -> Iterator[None]:
    """Within, these signals raise `SystemExit` with a shell's exit code for them; ignored ones stay ignored."""

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
