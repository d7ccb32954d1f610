"""`llmserve chat` on a pseudo-terminal, typed at as a user would."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LLMSERVE = [sys.executable, "-c", "from llmserve.cli.main import main; main()"]
ROWS, COLUMNS = 24, 80


@dataclass
class Terminal:
    process: subprocess.Popen[bytes]
    descriptor: int
    shown: str = ""

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def wait_for(self, text: str, *, count: int = 1) -> None:
        deadline = time.monotonic() + 60
        while self.shown.count(text) < count:
            readable, _, _ = select.select([self.descriptor], [], [], max(deadline - time.monotonic(), 0))
            assert readable, self.shown
            self.shown += os.read(self.descriptor, 4096).decode(errors="replace")

    def ask(self, text: str, answer: str) -> None:
        """Type a line, and wait for what comes behind it."""
        self.shown = ""
        self.type(f"{text}\n")
        self.wait_for(answer)

    def wait_for_prompt(self) -> None:
        self.wait_for("you> ", count=self.shown.count("you> ") + 1)


@contextmanager
def chat_terminal(url: str, state: Path, *arguments: str) -> Iterator[Terminal]:
    """`state`: where the history goes."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [*LLMSERVE, "chat", "--url", url, *arguments], stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, env={**os.environ, "XDG_STATE_HOME": str(state), "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    made = Terminal(process, ours)
    try:
        made.wait_for("you> ")
        yield made
    finally:
        process.kill()
        process.wait()
        os.close(ours)
