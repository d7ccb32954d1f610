"""`llmserve engine` and `serve --engine-socket`: several servers, one engine."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import LLMSERVE, ROOT, ServerProcess, llmserve, start_server
from tests.frontends.server import wait_until

TEXT = "Summarize: The connection is closed. Any pending data is sent before."


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="llmserve-test-") as folder:  # pytest's own are too long for a socket
        yield Path(folder) / "engine.sock"


@contextmanager
def running_engine(engine: Path, path: Path) -> Iterator[subprocess.Popen[str]]:
    arguments = [LLMSERVE, "engine", str(engine), "--socket", str(path), "--max-kv-tokens", "16384"]
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert f"at {path}" in process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def running_server(engine: Path, path: Path, *more: str) -> Iterator[ServerProcess]:
    server = start_server(str(engine), "--engine-socket", str(path), *more)
    try:
        yield server
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0


def ask(server: ServerProcess) -> str:
    message = {"role": "user", "content": TEXT}
    body: dict[str, Any] = {"model": "ensemble", "temperature": 0, "max_tokens": 24, "messages": [message]}
    request = urllib.request.Request(f"{server.http}/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.loads(answer.read())["choices"][0]["message"]["content"])


def answers(server: ServerProcess) -> bool:
    try:
        return ask(server) == "Close the connection."
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return False


def test_two_servers_share_an_engine_and_find_it_again(demo_engine: Path, path: Path) -> None:
    with (
        running_engine(demo_engine, path) as engine,
        running_server(demo_engine, path) as one,
        running_server(demo_engine, path) as other,
    ):
        assert ask(one) == ask(other) == "Close the connection."
        engine.kill()
        engine.wait()
        wait_until(lambda: not answers(one))
        with running_engine(demo_engine, path):
            wait_until(lambda: answers(one) and answers(other))


def test_an_engine_that_is_told_to_end_takes_its_socket_along(demo_engine: Path, path: Path) -> None:
    with running_engine(demo_engine, path) as engine:
        again = llmserve("engine", str(demo_engine), "--socket", str(path))
        assert (again.returncode, f"an engine already listens at {path}" in again.stderr) == (2, True)
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(timeout=60) == 0
        assert not path.exists()


def test_a_socket_of_a_process_that_is_gone_is_replaced(demo_engine: Path, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    with running_engine(demo_engine, path), running_server(demo_engine, path) as server:
        assert answers(server)


def test_another_engine_than_the_servers_is_refused(demo_engine: Path, path: Path, tmp_path: Path) -> None:
    checkpoint, other = ROOT / "build/checkpoints/baichuan2-tiny-docsum", tmp_path / "other"
    built = llmserve("build", str(checkpoint), "--dtype", "float32", "--output-dir", str(other))
    assert built.returncode == 0
    free = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    with running_engine(demo_engine, path):
        done = llmserve("serve", str(other), "--engine-socket", str(path), *free)
    assert done.returncode == 1
    assert "serve the engine's own directory" in " ".join(done.stdout.replace("|", " ").split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("engine", "ENGINE", "--socket", "/tmp/" + "x" * 110), "has at most 107 bytes"),
        (("engine", "ENGINE", "--socket", "/nowhere/engine.sock"), "there is no folder /nowhere"),
        (("engine", "ENGINE", "--socket", __file__), "is a file; give another path"),
        (("engine", "/nowhere", "--socket", "SOCKET"), "no engine directory /nowhere"),
        (
            ("serve", "ENGINE", "--engine-socket", "SOCKET", "--engine-process"),
            "with --engine-socket no engine runs here",
        ),
        (
            ("serve", "ENGINE", "--engine-socket", "SOCKET", "--cluster", "a.b"),
            "with --engine-socket no engine runs here",
        ),
    ],
)
def test_wrong_input_is_one_message(arguments: tuple[str, ...], words: str, demo_engine: Path, path: Path) -> None:
    done = llmserve(*(each.replace("ENGINE", str(demo_engine)).replace("SOCKET", str(path)) for each in arguments))
    assert done.returncode == 2
    assert words in done.stderr
