"""A separate server process, started on free ports of this machine, which always ends with this one.

It reads its standard input, and this process holds the other end: if this process is killed, the server ends.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from llmserve.errors import Unavailable
from llmserve.frontends.shared.restrictions import VARIABLES

STARTED = re.compile(r"Started (GRPCInferenceService|HTTPService|Metrics Service) at (\S+)")
GRPC, HTTP, METRICS = "GRPCInferenceService", "HTTPService", "Metrics Service"
FREE_PORTS = ("--host", "127.0.0.1", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
NUM_LINES = 20  # lines of its last output, for an error
POLL_S = 0.02
START_TIMEOUT_S = 1800.0  # enough for a large engine on a slow disk
STOP_TIMEOUT_S = 30.0
ENDING_S = 2.0


class OwnServer:
    """A server process; call `ready` first."""

    def __init__(self, command: Sequence[str]) -> None:
        self._began = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for this process, which ends the server
            env={name: value for name, value in os.environ.items() if name not in VARIABLES},  # it is for us alone
        )
        self._addresses: dict[str, str] = {}
        self._lines: deque[str] = deque(maxlen=NUM_LINES)
        self._reader = threading.Thread(target=self._read, name="llmserve-served", daemon=True)
        self._reader.start()
        self.open_seconds = 0.0  # from its start until it was ready

    @property
    def grpc(self) -> str:
        return self._addresses[GRPC]

    @property
    def http(self) -> str:
        return f"http://{self._addresses[HTTP]}"

    @property
    def metrics(self) -> str:
        return f"http://{self._addresses[METRICS]}"

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> None:
        """Wait until it is ready. Raises `Unavailable` with its last output if it does not start."""
        while len(self._addresses) < 3:
            self.check("did not start")
            if time.perf_counter() - self._began > START_TIMEOUT_S:
                raise Unavailable(f"the server was not ready after {START_TIMEOUT_S:g} s; its output:\n{self._said()}")
            await asyncio.sleep(POLL_S)
        self.open_seconds = time.perf_counter() - self._began

    def check(self, what: str = "ended unexpectedly") -> None:
        """Raises `Unavailable` with its last output if it has ended."""
        code = self._process.poll()
        if code is not None:
            self._reader.join(STOP_TIMEOUT_S)
            how = f"exit code {code}" if code >= 0 else f"signal {-code}"
            raise Unavailable(f"the server {what} ({how}); its output:\n{self._said()}")

    def require_alive(self) -> None:
        """Like `check`, for a server that no longer answers: it may just be ending."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_S)
        self.check()

    def peak_bytes(self) -> int:
        """Its peak memory; if the system does not report that, its current memory."""
        with suppress(OSError, ValueError, StopIteration):
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
            return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))
        return int(psutil.Process(self.pid).memory_info().rss)

    def close(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End it. Running requests may finish within the time limit."""
        try:
            self._process.terminate()
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._reader.join(timeout_s)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for line in pipe:
                self._lines.append(line)
                if found := STARTED.match(line):
                    self._addresses[found[1]] = found[2]

    def _said(self) -> str:
        return "".join(self._lines).rstrip() or "nothing"


@contextmanager
def own_server(command: Sequence[str], engine: Path, flags: Sequence[str]) -> Iterator[OwnServer]:
    """`command` is `llmserve serve` for an owner."""
    server = OwnServer([*command, str(engine), *FREE_PORTS, "--unknown-fields", "refuse", *flags])
    try:
        yield server
    except BaseException:
        server.close(timeout_s=0)
        raise
    server.close()
