"""`llmserve serve` as a child process: it ends when the program that started it ends, for any reason.

The owner keeps the other end of standard input open and writes nothing to it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from llmserve.cli.main import main as llmserve

STDIN = 0


def main() -> None:
    threading.Thread(target=_end_with_owner, name="llmserve-owner", daemon=True).start()
    sys.argv[1:1] = ["serve"]
    llmserve()


def _end_with_owner() -> None:
    while os.read(STDIN, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
