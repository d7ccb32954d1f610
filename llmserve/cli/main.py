"""Entry point. The rest is imported within, so that Ctrl-C meanwhile ends the program without a traceback."""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

BRIEF = ("inspect", "doctor")  # they import and print: garbage collection and OpenBLAS's threads are a quarter of that
INTERRUPTED = 128 + signal.SIGINT  # a shell's exit code for it


def main() -> None:
    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.default_int_handler:  # not where it is ignored, or somebody else's
        signal.signal(signal.SIGINT, _leave)
    if sys.argv[1:2] and sys.argv[1] in BRIEF:
        gc.disable()
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from llmserve.cli.app import run_command

    signal.signal(signal.SIGINT, previous)
    run_command()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(INTERRUPTED)
