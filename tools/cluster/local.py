"""A cluster on this machine: a front end of Dynamo with routing by cached prefixes, and workers of one engine."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-cluster"
MIGRATION_LIMIT = 3  # the most workers that a stream may lose
READY_S, END_S = 60, 30
LOCAL = "127.0.0.1"
BLOCKS_IN_USE = "dynamo_component_gpu_cache_usage_percent"
LISTENS = re.compile(r"Started (GRPCInferenceService|HTTPService|Metrics Service) at \S+?:(\d+)")


@dataclass(frozen=True, slots=True)
class Server:
    process: subprocess.Popen[bytes]
    grpc_port: int
    http_port: int
    metrics_port: int

    @property
    def grpc(self) -> str:
        return f"{LOCAL}:{self.grpc_port}"

    @property
    def http(self) -> str:
        return f"http://{LOCAL}:{self.http_port}"


def is_there() -> bool:
    return (ENVIRONMENT / ".created").is_file()


class LocalCluster:
    """Owns the cluster's processes. `folder` gets their logs, and the records by which they find each other."""

    def __init__(
        self, folder: Path, engine: Path, *, num_workers: int = 2, router: str = "kv", name: str = "demo",
        worker_flags: Sequence[str] = (), worker: Sequence[str] = ("llmserve", "worker"),
    ) -> None:  # fmt: skip
        """`worker`: the worker program to use instead of ours, in the cluster's environment."""
        self._folder = folder
        self._name = name
        self._worker = worker
        self.records = records = folder / "discovery"
        records.mkdir(parents=True)
        hosts = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST")
        self._environment = os.environ | dict.fromkeys(hosts, LOCAL) | {"DYN_FILE_KV": str(records)}
        self.port = free_port()
        self.workers: list[subprocess.Popen[bytes]] = []
        self._system_ports: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            flags = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
            more = ("--router-mode", router, "--migration-limit", str(MIGRATION_LIMIT))
            where = ("--http-host", LOCAL, "--http-port", str(self.port))
            self._start("frontend", ["python", "-m", "dynamo.frontend", *flags, *where, *more])
            for _ in range(num_workers):
                self.add_worker(engine, *worker_flags)
            self.wait_for_workers(num_workers)
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return f"http://{LOCAL}:{self.port}"

    def add_worker(self, engine: Path, *flags: str) -> subprocess.Popen[bytes]:
        command = [*self._worker, str(engine), "--name", self._name, "--threads", "1", *flags]
        port = free_port(below=2**15)  # the worker reads it as a signed 16-bit number
        self.workers.append(self._start(f"worker{len(self.workers)}", command, DYN_SYSTEM_PORT=str(port)))
        self._system_ports.append(port)
        return self.workers[-1]

    def add_server(self, engine: Path, *flags: str) -> Server:
        """Starts our server, which gets its tokens from the workers. It prints its addresses when it is ready."""
        number = sum(path.name.startswith("server") for path in self._folder.iterdir())
        ports = ("--host", LOCAL, "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
        command = ["llmserve", "serve", str(engine), "--cluster", f"dynamo.{self._name}", *ports, *flags]
        process = self._start(f"server{number}", command)
        deadline = time.monotonic() + READY_S
        while len(found := dict(LISTENS.findall(self.said(f"server{number}")))) < 3:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{self.said(f'server{number}')}")
            time.sleep(0.05)
        return Server(
            process, *(int(found[name]) for name in ("GRPCInferenceService", "HTTPService", "Metrics Service"))
        )

    def metrics(self, number: int) -> str:
        """Returns one worker's metrics, in Prometheus's format."""
        with urllib.request.urlopen(f"http://{LOCAL}:{self._system_ports[number]}/metrics", timeout=5) as answer:
            return str(answer.read().decode())

    def is_busy(self, number: int) -> bool:
        """Returns whether a worker holds blocks, according to its metrics, which can be a tenth of a second old."""
        lines = [line for line in self.metrics(number).splitlines() if line.startswith(BLOCKS_IN_USE)]
        return any(float(line.split()[-1]) > 0 for line in lines)

    def said(self, name: str) -> str:
        """Returns the log of "frontend", "worker0" and so on, so far."""
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def wait_for_workers(self, count: int) -> None:
        """Waits until the front end has the model, and `count` workers have registered it."""
        deadline = time.monotonic() + READY_S
        while not (self._is_listed() and self._num_registered() >= count):
            ended = [process.args for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                said = "\n".join(
                    path.read_text(errors="replace")[-2000:] for path in sorted(self._folder.glob("*.log"))
                )
                raise RuntimeError(f"the cluster did not come up ({ended} ended):\n{said}")
            time.sleep(0.05)
        time.sleep(0.3)  # the front end reads the records later

    def kill(self, number: int) -> None:
        """Kills a worker without any message, like a machine that fails."""
        self.workers[number].send_signal(signal.SIGKILL)
        self.workers[number].wait()

    def stop(self, worker: subprocess.Popen[bytes]) -> int:
        """Ends a worker normally, so that it drains. Returns its exit code."""
        worker.terminate()
        code = worker.wait(END_S)
        self._processes.remove(worker)
        return code

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, name: str, command: Sequence[str], **more: str) -> subprocess.Popen[bytes]:
        program = [str(ENVIRONMENT / "bin" / command[0]), *command[1:]]
        environment = {**self._environment, **more}
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                program, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=ROOT
            )
        self._processes.append(process)
        return process

    def _is_listed(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as answer:
                return f'"{self._name}"' in answer.read().decode()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def _num_registered(self) -> int:
        return sum("Serving" in self.said(f"worker{number}") for number in range(len(self.workers)))


def free_port(below: int | None = None) -> int:
    """Returns any free port, or a random one from 16,384 up to `below`."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind((LOCAL, random.randrange(2**14, below) if below else 0))
            except OSError:  # taken
                continue
            return int(probe.getsockname()[1])
