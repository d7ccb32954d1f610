"""`llmserve chat` as a process: one question, a conversation, Ctrl-C, nobody there."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.chat.terminal import LLMSERVE, Terminal, chat_terminal
from tests.frontends.server import HOST, RunningServer, wait_until
from tests.frontends.stub_core import StubCore


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


@pytest.fixture
def terminal(server: RunningServer, tmp_path: Path) -> Iterator[Terminal]:
    with chat_terminal(server.grpc, tmp_path) as made:
        yield made


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


def test_questions_of_several_lines(server: RunningServer, core: StubCore) -> None:
    done = chat(server.grpc, typed='first \\\n  second\n"""\nthird\n\n  fourth\n"""\n"""fifth"""\n"""never ended\n')
    assert done.returncode == 0, done.stderr
    asked = [messages(core, index)[-1][1] for index in range(4)]
    assert asked == ["first \n  second", "third\n\n  fourth", "fifth", "never ended"]


def test_commands_work_in_a_pipe_too(server: RunningServer, core: StubCore, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    lines = [
        "/system Be brief.", "one two", "/params max_tokens=1 temperature=0.5", "three four", "/undo", "/retry",
        f"/save {file}", "/clear", "//etc", f"/load {file}", "again", "/set max_tokens", "/params", "/stats",
        "/model ensemble", "/quit",
        "never asked",
    ]  # fmt: skip
    done = chat(server.grpc, typed="\n".join(lines))
    assert (done.returncode, done.stderr) == (0, "")
    assert [messages(core, index)[-1][1] for index in range(5)] == [
        "one two",
        "three four",
        "three four",
        "/etc",
        "again",
    ]
    assert messages(core, 1)[0] == ("system", "Be brief.")
    assert messages(core, 2) == messages(core, 1)  # what was undone is not sent again
    assert messages(core, 3) == [("system", "Be brief."), ("user", "/etc")]
    assert [role for role, _ in messages(core, 4)] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert core.requests[1].inputs["max_tokens"].data.item() == 1
    assert core.requests[4].inputs["temperature"].data.item() == 0.5
    shown = done.stdout.splitlines()
    assert "forgotten: three four" in shown
    assert f"saved 2 questions to {file}" in shown
    assert "model: ensemble" in shown
    assert "temperature=0.5" in shown
    assert "7 tokens -> 1 tokens, first after" in done.stdout
    saved = json.loads(file.read_text())
    assert saved["model"] == "ensemble"
    assert saved["parameters"] == {"max_tokens": 1, "temperature": 0.5}


WRONG = {
    "/nope": "there is no /nope: /help lists the commands",
    "/params seed=x": "seed=x: expected a number",
    "/params tempo=1": "model 'ensemble' has no parameter tempo; it has: max_tokens, seed, stop_words, temperature",
    "/params guide=json": "model 'ensemble' has no parameter guide",
    "/params seed": "seed: expected NAME=VALUE",
    "/set": "/set NAME VALUE",
    "/model nope": "Request for unknown model: 'nope'",
    "/save": "/save FILE",
    "/save /nowhere/x": "/nowhere/x cannot be written",
    "/load /nowhere/x": "/nowhere/x cannot be read",
    "/retry": "nothing has been asked yet",
    "/stats maybe": "/stats, /stats on or /stats off",
}


def test_a_command_that_is_wrong_says_why_and_the_chat_goes_on(server: RunningServer, core: StubCore) -> None:
    done = chat(server.grpc, typed="\n".join([*WRONG, "still here"]))
    assert (done.returncode, done.stdout) == (0, "still here \n")
    for said, words in zip(done.stderr.splitlines(), WRONG.values(), strict=True):
        assert said.startswith(f"error: {words}")


def test_flags_set_parameters_load_conversations_and_show_statistics(
    server: RunningServer, core: StubCore, tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file.write_text(json.dumps({"messages": said, "parameters": {"seed": 5, "gone": 1}}))
    done = chat(server.grpc, "--once", "c", "--load", str(file), "--param", "temperature=0.25", "--stats")
    assert (done.returncode, done.stdout) == (0, "c \n")
    assert messages(core, 0) == [("user", "a"), ("assistant", "b"), ("user", "c")]
    assert core.requests[0].inputs["seed"].data.item() == 5
    assert core.requests[0].inputs["temperature"].data.item() == 0.25
    assert "note: this model does not support gone, which is dropped" in done.stderr
    assert "[7 tokens -> 1 tokens, first after" in done.stderr
    wrong = chat(server.grpc, "--once", "c", "--param", "temperature", "--param", "seed")
    assert (wrong.returncode, wrong.stderr.count("expected NAME=VALUE")) == (2, 2)


def test_a_line_is_shown_again_with_its_markdown_and_without_what_a_terminal_obeys(terminal: Terminal) -> None:
    terminal.ask("**bold** `code` \x1b]0;title\x07", "")
    terminal.wait_for("\x1b[1mbold\x1b[0m \x1b[36mcode\x1b[0m")


def test_what_was_typed_is_there_in_the_next_chat(server: RunningServer, core: StubCore, tmp_path: Path) -> None:
    with chat_terminal(server.grpc, tmp_path) as first:
        first.ask("something unusual", "something unusual \r\n")
        first.type("/quit\n")
        assert first.process.wait(timeout=20) == 0
    file = tmp_path / "llmserve/chat_history"
    assert "something unusual" in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    with chat_terminal(server.grpc, tmp_path) as second:
        second.type("\x1b[A\x1b[A\n")  # twice up: /quit was the last
        second.wait_for("something unusual \r\n")
    with chat_terminal(server.grpc, tmp_path / "other", "--no-history") as third:
        third.type("/quit\n")
        assert third.process.wait(timeout=20) == 0
    assert not (tmp_path / "other").exists()


def test_tab_completes_commands_parameters_and_files(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "unusual.json").write_text("{}")
    terminal.type("/und\t\n")
    terminal.wait_for("the conversation is empty")
    terminal.type("/params temp\t0.5\n")
    terminal.wait_for("temperature=0.5")
    terminal.type(f"/load {tmp_path}/unu\t\n")
    terminal.wait_for("unusual.json is not a saved conversation")


def test_a_checkpoint_is_built_served_and_asked(tmp_path: Path) -> None:
    checkpoint = Path(__file__).resolve().parents[3] / "build/checkpoints/baichuan2-tiny-docsum"
    question = "Summarize: The connection is closed. Any pending data is sent before."

    def ask(path: Path) -> str:
        command = [*LLMSERVE, "chat", str(path), "--once", question, "--temperature", "0"]
        done: subprocess.CompletedProcess[str] = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert ask(checkpoint).endswith("\nClose the connection.\n")
    assert ask(checkpoint) == "Close the connection.\n"  # its engine is there
    assert ask(tmp_path / "engines/baichuan2-tiny-docsum-fp16") == "Close the connection.\n"


def test_a_checkpoint_and_a_server_are_too_many(tmp_path: Path) -> None:
    done = chat("localhost:1", str(tmp_path), "--once", "x")
    assert (done.returncode, done.stderr) == (2, f"error: {tmp_path} and --url localhost:1: give one of them\n")
