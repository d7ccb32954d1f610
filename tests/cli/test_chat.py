"""`llmserve chat` as a process: one question, a conversation, Ctrl-C, nobody there."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.frontends.server import HOST, RunningServer, wait_until
from tests.frontends.stub_core import StubCore

LLMSERVE = [sys.executable, "-c", "from llmserve.cli.main import main; main()"]


def chat(url: str, *arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    command = [*LLMSERVE, "chat", "--url", url, *arguments]
    return subprocess.run(command, input=typed, capture_output=True, text=True, timeout=60)


def messages(core: StubCore, index: int) -> list[tuple[str, str]]:
    sent = json.loads(core.requests[index].inputs["messages"].data.item())
    return [(message["role"], message["content"]) for message in sent]


def test_one_question(server: RunningServer, core: StubCore) -> None:
    done = chat(
        server.grpc, "--once", "hello there", "--max-tokens", "5", "--temperature", "0.5", "--system", "Be brief."
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello there \n", "")
    assert messages(core, 0) == [("system", "Be brief."), ("user", "hello there")]
    assert core.requests[0].inputs["max_tokens"].data.item() == 5
    assert core.requests[0].inputs["temperature"].data.item() == 0.5


def test_the_conversation_so_far_is_sent_along(server: RunningServer, core: StubCore) -> None:
    done = chat(server.grpc, typed="first question\n\nsecond\n")
    assert (done.returncode, done.stdout) == (0, "first question \nsecond \n")
    assert messages(core, 1) == [
        ("user", "first question"), ("assistant", "first question "), ("user", "second"),
    ]  # fmt: skip


def test_an_error_does_not_end_the_conversation(server: RunningServer, core: StubCore) -> None:
    done = chat(server.grpc, typed="fail\nagain\n")
    assert done.returncode == 0
    assert "error: the model failed" in done.stderr
    assert messages(core, 1) == [("user", "again")]


def test_nobody_there() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    done = chat(f"{HOST}:{port}", "--once", "x")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: no server answers at {HOST}:{port}")
    assert "Traceback" not in done.stderr


def test_an_unknown_model(server: RunningServer) -> None:
    done = chat(server.grpc, "--once", "x", "--model", "nope")
    assert done.returncode == 2
    assert "unknown model: 'nope'" in done.stderr


@dataclass
class Terminal:
    """`llmserve chat` on a pseudo-terminal."""

    process: subprocess.Popen[bytes]
    descriptor: int
    shown: str = ""

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def wait_for(self, text: str, *, count: int = 1) -> None:
        deadline = time.monotonic() + 60
        while self.shown.count(text) < count:
            readable, _, _ = select.select([self.descriptor], [], [], deadline - time.monotonic())
            assert readable, self.shown
            self.shown += os.read(self.descriptor, 4096).decode()


@pytest.fixture
def terminal(server: RunningServer) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    command = [*LLMSERVE, "chat", "--url", server.grpc]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    made = Terminal(process, ours)
    made.wait_for("you> ")
    yield made
    process.kill()
    process.wait()
    os.close(ours)


def test_ctrl_c_cancels_the_answer_and_not_the_program(terminal: Terminal, core: StubCore) -> None:
    terminal.type("forever\n")
    terminal.wait_for("forever forever")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("[cancelled]")
    wait_until(lambda: core.running == 0)
    terminal.type("still here\n")
    terminal.wait_for("still here \r\n")
    assert messages(core, 1)[0] == ("user", "forever")
    assert messages(core, 1)[1][1].startswith("forever forever")


@pytest.mark.parametrize("ending", ["ctrl-c", "ctrl-d"])
def test_ctrl_c_and_ctrl_d_at_the_prompt_end_the_program(terminal: Terminal, ending: str) -> None:
    if ending == "ctrl-c":
        time.sleep(0.5)  # readline does not see a signal that comes between its prompt and its wait for a key
        terminal.process.send_signal(signal.SIGINT)
    else:
        terminal.type("\x04")
    assert terminal.process.wait(timeout=20) == 0
