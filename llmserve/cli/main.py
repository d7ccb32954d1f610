"""Entry point. The rest is imported in `main`, so that Ctrl-C during imports ends the program without a traceback."""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn, TextIO, cast

BRIEF = ("inspect", "doctor")  # mostly imports, of whose time garbage collection and OpenBLAS's threads are a quarter
LOST = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # output could not be stored
INTERRUPTED = 128 + signal.SIGINT  # a shell's exit code for Ctrl-C


def main() -> None:
    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.default_int_handler:  # not if it is ignored or another handler is set
        signal.signal(signal.SIGINT, _leave)
    gc.set_threshold(20_000, 10, 100)  # imports and checkpoints are many objects, few of them garbage
    if sys.argv[1:2] and sys.argv[1] in BRIEF:
        gc.disable()
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _open_streams()
    from llmserve.cli.app import run_command

    signal.signal(signal.SIGINT, previous)
    try:
        run_command()
    except (SystemExit, OSError) as end:
        is_lost = isinstance(end, OSError) and end.filename is None and end.errno in LOST
        problem = _unwritten() or (end if is_lost else None)
        if not isinstance(problem, OSError):
            raise
        if not isinstance(problem, BrokenPipeError):  # the reader may stop
            with suppress(OSError):
                print(f"error: the output cannot be written: {problem.strerror}", file=sys.stderr)
        sys.exit(1)


def _open_streams() -> None:
    """Replace closed streams by /dev/null. Standard output prints "?" for characters that its encoding lacks."""
    sys.stdin = sys.stdin or _nowhere("r")  # in this order: the first takes the descriptor 0
    sys.stdout = sys.stdout or _nowhere("w")
    sys.stderr = sys.stderr or _nowhere("w")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def _nowhere(mode: str) -> TextIO:
    return cast(TextIO, open(os.devnull, mode))


def _unwritten() -> OSError | None:
    """The error if output could not be written. The rest of the output is then dropped."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter reports it at exit
        return error
    return None


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(INTERRUPTED)
