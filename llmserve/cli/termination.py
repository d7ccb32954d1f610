"""A command that is told to end unwinds its stack, as with Ctrl-C, so that nothing half-done is left."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

NUMBERS = (signal.SIGTERM, signal.SIGHUP)


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
