"""Runs the main workflow: build -> eval -> serve -> chat, with the commands that a user would type.

Run it through `make demo`. Each step prints its command first; the script stops at the first one that fails.
"""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LLMSERVE = str(Path(sys.executable).with_name("llmserve"))
CHECKPOINT = "build/checkpoints/baichuan2-tiny-docsum"
ENGINE = "engines/baichuan2-tiny-docsum-fp16"
SUITE = "eval/suites/docstrings.yaml"
DOCUMENT = (
    "Summarize:\nIf the key is in the dictionary, its value is returned; otherwise the default, which is None if it is "
    "not given."
)
READY_TIMEOUT_S = 60


def announce(title: str, arguments: list[str]) -> None:
    print(f"\n\033[1m== {title}\033[0m\n$ llmserve {shlex.join(arguments)}", flush=True)


def llmserve(title: str, *arguments: str) -> None:
    announce(title, list(arguments))
    code = subprocess.run([LLMSERVE, *arguments], cwd=ROOT, check=False).returncode
    if code != 0:
        sys.exit(f"demo: '{title}' failed with exit code {code}")


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def wait_until_ready(server: subprocess.Popen[bytes], http_port: int) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{http_port}/v2/health/ready", timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    sys.exit(f"demo: the server was not ready within {READY_TIMEOUT_S} s")


class Server(NamedTuple):
    http: str
    grpc: str


@contextmanager
def served(engine: str) -> Iterator[Server]:
    http, grpc, metrics = free_ports(3)
    arguments = ["serve", engine, "--host", "127.0.0.1"]
    arguments += ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    announce("Serve it: preprocessing -> tensorrt_llm -> postprocessing", arguments)
    server = subprocess.Popen([LLMSERVE, *arguments], cwd=ROOT)
    try:
        wait_until_ready(server, http)
        yield Server(f"127.0.0.1:{http}", f"127.0.0.1:{grpc}")
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(timeout=40)
    if code != 0:
        sys.exit(f"demo: the server ended with exit code {code}")


def main() -> None:
    started = time.monotonic()
    llmserve("Build an engine from the checkpoint", "build", CHECKPOINT, "--dtype", "float16", "--output-dir", ENGINE)
    llmserve(
        "Compare it with the Hugging Face baseline", "eval", ENGINE, "--hf-model-dir", CHECKPOINT, "--suite", SUITE
    )
    with served(ENGINE) as server:
        llmserve("Stream one answer over gRPC", "chat", "--url", server.grpc, "--once", DOCUMENT)
    print(f"\n\033[1mDone in {time.monotonic() - started:.0f} s.\033[0m The engine is in {ENGINE}; next: make serve")


if __name__ == "__main__":
    main()
