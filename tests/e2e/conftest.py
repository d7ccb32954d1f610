"""A real demo engine and a real `llmserve serve` process, once per test session."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "build/checkpoints/baichuan2-tiny-docsum"
LLMSERVE = str(Path(sys.executable).with_name("llmserve"))
ADDRESS = re.compile(r"(GRPCInferenceService|HTTPService|Metrics Service) at \S+?:(\d+)")
READY_TIMEOUT_S = 60


@dataclass(frozen=True)
class ServerProcess:
    process: subprocess.Popen[str]
    ports: dict[str, int]
    printed: str = ""  # until it was ready

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.ports['GRPCInferenceService']}"

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.ports['HTTPService']}"

    @property
    def metrics(self) -> str:
        return f"http://127.0.0.1:{self.ports['Metrics Service']}/metrics"


def llmserve(
    *arguments: str, timeout: float = 300, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """One command, as a user would type it in the repository root."""
    return subprocess.run(
        [LLMSERVE, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL,
        env=env,
    )  # fmt: skip


def start_server(
    *arguments: str, env: Mapping[str, str] | None = None, program: Sequence[str] = (LLMSERVE,), command: str = "serve"
) -> ServerProcess:
    """Start `llmserve serve` on free ports and return once its addresses are printed."""
    ports_flags = ("--host", "127.0.0.1", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    process = subprocess.Popen(
        [*program, command, *ports_flags, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env=env,
    )  # fmt: skip
    assert process.stdout is not None
    ports: dict[str, int] = {}
    printed: list[str] = []
    watchdog = threading.Timer(READY_TIMEOUT_S, process.kill)
    watchdog.start()
    for line in process.stdout:
        printed.append(line)
        if match := ADDRESS.search(line):
            ports[match[1]] = int(match[2])
        if len(ports) == 3:
            break
    watchdog.cancel()
    assert len(ports) == 3, "the server did not start:\n" + "".join(printed)
    threading.Thread(target=_drain, args=(process,), daemon=True).start()  # keep the pipe empty
    return ServerProcess(process, ports, "".join(printed))


def _drain(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    with process.stdout as pipe:
        for _ in pipe:
            pass


@pytest.fixture(scope="session")
def demo_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = tmp_path_factory.mktemp("engines") / "demo-fp16"
    done = llmserve("build", str(CHECKPOINT), "--dtype", "float16", "--output-dir", str(engine))
    assert done.returncode == 0, done.stderr
    return engine


@pytest.fixture(scope="session")
def server(demo_engine: Path) -> Iterator[ServerProcess]:
    server = start_server(str(demo_engine))
    yield server
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=60) == 0
