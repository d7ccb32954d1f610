"""Runs programs that may fail, hang or crash, together with their child processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TAIL_LINES = 40


@dataclass(frozen=True, slots=True)
class Finished:
    code: int | None  # None: it was ended after the timeout
    stdout: str
    stderr: str

    def tail(self) -> str:
        """The end of its error output, or else of its output."""
        said = self.stderr.strip() or self.stdout.strip()
        return "\n".join(said.splitlines()[-TAIL_LINES:])

    def last_line(self) -> str:
        return self.tail().rpartition("\n")[2]


def run(command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str] | None = None) -> Finished:
    """Runs a program. Output goes to files, because a process that outlives its parent would keep a pipe open."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        code: int | None
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(process)
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read())
    return Finished(code, *texts)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kills the rest of its process group, including ranks and workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
