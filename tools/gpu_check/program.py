"""Programs that may fail, hang or crash, with the processes that they start."""

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
    code: int | None  # None: it was ended, for it took too long
    stdout: str
    stderr: str

    def tail(self) -> str:
        """The end of what it said: of its errors where it named any."""
        said = self.stderr.strip() or self.stdout.strip()
        return "\n".join(said.splitlines()[-TAIL_LINES:])

    def last_line(self) -> str:
        return self.tail().rpartition("\n")[2]


def run(command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str] | None = None) -> Finished:
    """Into files, not pipes: a process that outlives its parent would hold a pipe open."""
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
    """What is left of it, ranks and workers included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
