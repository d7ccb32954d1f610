"""Starts the two servers that are compared: `llmserve serve`, and the real Triton of the `nvidia-pytriton` wheel."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import psutil

Exchange: TypeAlias = dict[str, Any]  # plain JSON values
HOST = "127.0.0.1"
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 30
LLMSERVE = (str(Path(sys.executable).parent / "llmserve"), "serve", "--host", HOST)


@dataclass(frozen=True)
class Endpoint:
    """A running server, and the repository or engine that it serves."""

    repository: Path
    http_port: int
    grpc_port: int
    metrics_port: int
    pid: int
    exchanges: list[Exchange] | None = None  # requests and answers, if they are recorded

    @property
    def grpc(self) -> str:
        return f"{HOST}:{self.grpc_port}"

    @property
    def http(self) -> str:
        return f"{HOST}:{self.http_port}"


class RevivedServer(ExitStack):
    """A server that is started when it is needed, and restarted after it has ended."""

    def __init__(self, start: Callable[[], AbstractContextManager[Endpoint]]) -> None:
        super().__init__()
        self._start = start
        self._endpoint: Endpoint | None = None

    def endpoint(self) -> Endpoint:
        if self._endpoint is None or self.has_ended():
            self.end()
            self._endpoint = self.enter_context(self._start())
        return self._endpoint

    def end(self) -> None:
        self.close()
        self._endpoint = None

    def has_ended(self, *, within_s: float = 0.0) -> bool:
        """Returns whether it has ended by itself, or does so within `within_s` seconds."""
        deadline = time.monotonic() + within_s
        while self._endpoint is not None:
            try:
                if psutil.Process(self._endpoint.pid).status() == psutil.STATUS_ZOMBIE:
                    return True
            except psutil.NoSuchProcess:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return False


@contextmanager
def on_cpus(cpus: Set[int], start: Callable[[], AbstractContextManager[Endpoint]]) -> Iterator[Endpoint]:
    """Starts a server on `cpus`, while this thread uses the others."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)  # inherited by processes that are started
    try:
        with start() as endpoint:
            os.sched_setaffinity(0, own - cpus)
            yield endpoint
    finally:
        os.sched_setaffinity(0, own)


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def llmserve_server(
    repository: Path,
    log: Path,
    *flags: str,
    ports: Sequence[int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Endpoint]:
    """`ports`: for HTTP, gRPC and metrics; None: free ones. `environment`: additional variables."""
    command = [*LLMSERVE, f"--model-repository={repository}"]
    whole = {**os.environ, **(environment or {})}
    with _running(command, repository, log, flags, environment=whole, ports=ports) as endpoint:
        yield endpoint


@contextmanager
def engine_server(
    engine: Path, log: Path, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[Endpoint]:
    """Starts `llmserve serve ENGINE`, without a repository."""
    whole = {**os.environ, **(environment or {})}
    with _running([*LLMSERVE, str(engine)], engine, log, flags, environment=whole, ports=None) as endpoint:
        yield endpoint


@contextmanager
def triton_server(
    installed: Path,
    repository: Path,
    log: Path,
    *flags: str,
    ports: Sequence[int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Endpoint]:
    """`installed`: a virtual environment with nvidia-pytriton, whose Python the backend's stub uses."""
    (root,) = installed.glob("lib/python3.*/site-packages/pytriton/tritonserver")
    stub = root / "backends/python/triton_python_backend_stub"
    if not stub.exists():
        shutil.copy(root / f"python_backend_stubs/{root.parents[2].name.removeprefix('python')}/{stub.name}", stub)
    whole = {
        **os.environ,
        **(environment or {}),
        "PATH": f"{installed / 'bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(root.parents[1] / "nvidia_pytriton.libs"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    addresses = [f"--{protocol}-address={HOST}" for protocol in ("http", "grpc", "metrics")]
    folders = [f"--backend-directory={root / 'backends'}", f"--cache-directory={root / 'caches'}"]
    command = [str(root / "bin/tritonserver"), f"--model-repository={repository}", *addresses, *folders]
    with _running(command, repository, log, flags, environment=whole, ports=ports) as made:
        yield made


@contextmanager
def _running(
    command: Sequence[str],
    repository: Path,
    log: Path,
    flags: Sequence[str],
    *,
    environment: dict[str, str],
    ports: Sequence[int] | None,
) -> Iterator[Endpoint]:
    ports = ports or free_ports(3)
    named = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *named, *flags],
            stdout=output, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip
    try:
        _wait_until_live(process, ports[0], log)
        http, grpc, metrics = ports
        yield Endpoint(repository, http, grpc, metrics, process.pid)
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and its child processes, which survive a server that is killed."""
    try:
        started = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        started = []
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for one in started:
        with suppress(psutil.NoSuchProcess):
            one.kill()


def _wait_until_live(process: subprocess.Popen[bytes], http_port: int, log: Path) -> None:
    """Waits until the server is ready."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended at once:\n{log.read_text(errors='replace')[-4000:]}")
        try:
            urllib.request.urlopen(f"http://{HOST}:{http_port}/v2/health/ready", timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(
        f"the server was not ready after {START_TIMEOUT_S} s:\n{log.read_text(errors='replace')[-4000:]}"
    )
