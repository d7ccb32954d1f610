"""`serve --frontends N`: servers on the same ports, one engine."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.e2e.conftest import ServerProcess, llmserve, start_server
from tests.frontends.server import wait_until

TEXT = "Summarize: The connection is closed. Any pending data is sent before."
NUM_REQUESTS = 12


@contextmanager
def running(engine: Path, *more: str) -> Iterator[ServerProcess]:
    server = start_server(str(engine), "--frontends", "2", "--max-kv-tokens", "16384", *more)
    try:
        yield server
        below = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
        assert psutil.wait_procs(below, timeout=60)[1] == []
    finally:
        server.process.kill()
        server.process.wait()


def ask(server: ServerProcess) -> str:
    """Over a connection of its own."""
    message = {"role": "user", "content": TEXT}
    body = json.dumps({"temperature": 0, "max_tokens": 24, "messages": [message]}).encode()
    with urllib.request.urlopen(f"{server.http}/v1/chat/completions", body, timeout=60) as answer:
        return str(json.loads(answer.read())["choices"][0]["message"]["content"])


def answers(server: ServerProcess) -> bool:
    try:
        return ask(server) == "Close the connection."
    except OSError:
        return False


def processes(server: ServerProcess, word: str) -> list[psutil.Process]:
    found = []
    for each in psutil.Process(server.process.pid).children():
        with suppress(psutil.Error):  # it has just ended
            if word in " ".join(each.cmdline()):
                found.append(each)
    return found


def test_several_servers_are_one(demo_engine: Path) -> None:
    with running(demo_engine) as server:
        assert "Without effect" not in server.printed  # of --max-kv-tokens, which the engine has
        assert {ask(server) for _ in range(NUM_REQUESTS)} == {"Close the connection."}
        with urllib.request.urlopen(server.metrics, timeout=60) as answer:
            samples = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
        assert samples['nv_inference_request_success{model="ensemble",version="1"}'] == str(NUM_REQUESTS)
        assert {value for name, value in samples.items() if name.startswith("llmserve_engine_info")} == {"1"}
        [engine], servers = processes(server, "engine_process"), processes(server, "owned_server")
        assert len(servers) == 2

        servers[0].kill()
        servers[0].wait(timeout=60)  # the kernel gives it no connection any more
        assert {ask(server) for _ in range(NUM_REQUESTS)} == {"Close the connection."}
        wait_until(lambda: len(processes(server, "owned_server")) == 2)

        engine.kill()
        wait_until(lambda: all(answers(server) for _ in range(NUM_REQUESTS)))


def test_what_belongs_to_one_server_is_refused_by_name(demo_engine: Path, tmp_path: Path) -> None:
    done = llmserve(
        "serve", str(demo_engine), "--frontends", "2", "--engine-process", "--model-control-mode", "poll",
        "--batch-dir", str(tmp_path), "--allow-client-shm", "--rate-limit", "execution_count",
        "--trace-config", "triton,file=x",
    )  # fmt: skip
    assert done.returncode == 2
    for name in ("engine-process", "model-control-mode poll", "batch-dir", "allow-client-shm", "rate-limit"):
        assert f"--{name}: " in done.stderr
    assert "--trace-config with a file: " in done.stderr
