"""The engine's process from its parent's side: its settings, whether it is ready, and how it ended.

The process reads one line of standard input, `ChildSpec.line`, and ends when standard input is closed, which also
happens if its parent dies. On standard output, it reports once that it is ready, or its error. Its standard error is
its log, which is added to the parent's.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from llmserve.engine.remote.messages import error_document, read_error
from llmserve.engine.settings import EngineSettings, GpuSettings
from llmserve.errors import InvalidArgument, LlmserveError, Unavailable
from llmserve.scheduler.drafts.drafter import Speculation
from llmserve.scheduler.settings import Policy, SchedulerSettings

LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"
LOG_LINE = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.-]+): (.*)")
MAX_PATH_BYTES = 107  # of a Unix socket's
END_TIMEOUT_S = 35.0  # a step cannot be interrupted

CHOICES = {"policy": Policy, "speculation": Speculation}
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """The settings of the process."""

    engine_dir: Path
    tokenizer_dir: Path  # its tokenizer is used to compile guides
    settings: EngineSettings
    socket: Path
    log_level: int = logging.WARNING

    def line(self) -> bytes:
        settings = asdict(self.settings)
        for name in CHOICES:
            settings["scheduler"][name] = settings["scheduler"][name].value
        document = {
            "engine_dir": str(self.engine_dir),
            "tokenizer_dir": str(self.tokenizer_dir),
            "settings": settings,
            "socket": str(self.socket),
            "log_level": self.log_level,
        }
        return json.dumps(document).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> ChildSpec:
        document = json.loads(line)
        settings = document["settings"]
        choices = {name: kind(settings["scheduler"][name]) for name, kind in CHOICES.items()}
        scheduler = settings["scheduler"] | choices
        gpu: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in settings["gpu"].items()
        }
        return cls(
            Path(document["engine_dir"]),
            Path(document["tokenizer_dir"]),
            EngineSettings(**settings | {"scheduler": SchedulerSettings(**scheduler), "gpu": GpuSettings(**gpu)}),
            Path(document["socket"]),
            document["log_level"],
        )


def ready_line(error: LlmserveError | None = None) -> bytes:
    """The single report of the process: that it is ready, or its error."""
    return json.dumps({} if error is None else error_document(error)).encode() + b"\n"


class Child:
    """Owns a process that it has started."""

    def __init__(self, command: Sequence[str], spec: ChildSpec) -> None:
        """Raises `InvalidArgument` if no socket can be created."""
        if len(os.fsencode(spec.socket)) > MAX_PATH_BYTES:
            problem = f"the engine's socket path may have at most {MAX_PATH_BYTES} bytes; {spec.socket} is longer"
            raise InvalidArgument(f"{problem}; set TMPDIR to a folder with a shorter path")
        # A separate session: the terminal's Ctrl-C is for the parent, which first finishes answers.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self._logs = threading.Thread(target=self._pass_logs_on, name="llmserve-engine-logs", daemon=True)
        self._logs.start()
        with suppress(BrokenPipeError):  # `wait_ready` reports how it ended
            stdin = self._stdin()
            stdin.write(spec.line())
            stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Raises the engine's loading error, or `Unavailable` if the process ended before."""
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            line = stdout.readline()
        if not line:
            raise Unavailable(f"the engine's process ended while loading the engine: {self.end()}")
        document: Mapping[str, Any] = json.loads(line)
        if document:
            self.end()
            raise read_error(document)

    def end(self, timeout_s: float = END_TIMEOUT_S) -> str:
        """Ask it to end, and return how it ended; it is killed after `timeout_s`."""
        with suppress(BrokenPipeError):
            self._stdin().close()
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._logs.join()
        return exit_text(status)

    def kill(self) -> None:
        self._process.kill()

    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _pass_logs_on(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for data in lines:
                name, level, line = logger.name, logging.WARNING, data.decode(errors="replace").rstrip("\n")
                if found := LOG_LINE.fullmatch(line):
                    level, name, line = logging.getLevelNamesMapping()[found[1]], found[2], found[3]
                logging.getLogger(name).log(level, "[engine process %d] %s", self.pid, line)


def exit_text(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {-status}, {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
