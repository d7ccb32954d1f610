"""`llmserve bench` and `llmserve chat` with a real server of the demo engine."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.cli.chat.terminal import chat_terminal
from tests.e2e.conftest import ServerProcess, llmserve, start_server

QUESTION = "Summarize: The connection is closed. Any pending data is sent before."
ANSWER = "Close the connection."


@pytest.mark.parametrize("protocol", ["chat", "completions", "grpc"])
def test_prompts_and_answers_have_the_wanted_tokens(
    server: ServerProcess, demo_engine: Path, tmp_path: Path, protocol: str
) -> None:
    url = server.grpc if protocol == "grpc" else server.http
    done = llmserve(
        "bench", "--url", url, "--protocol", protocol, "--requests", "12", "--concurrency", "3", "--input-tokens", "40",
        "--output-tokens", "16", "--prefix-tokens", "32", "--tokenizer-dir", str(demo_engine), "--json",
        str(tmp_path / "x.json"),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    (run,) = json.loads((tmp_path / "x.json").read_text())["runs"]
    assert (run["request_count"], run["error_request_count"], run["tokens_counted_by"]) == (12, 0, "server")
    assert run["output_sequence_length"]["min"] == run["output_sequence_length"]["max"] == 16
    lengths = run["input_sequence_length"]
    assert 72 - 4 <= lengths["min"] <= lengths["max"] <= 72 + 8  # what the chat format adds, and where prefixes end
    assert run["cached_prompt_tokens"]["max"] >= 32


def test_the_server_says_how_long_words_are(server: ServerProcess, tmp_path: Path) -> None:
    arguments = ("--requests", "30", "--rate", "50", "--input-tokens", "60", "--output-tokens", "2")
    done = llmserve("bench", "--url", server.http, *arguments, "--json", str(tmp_path / "x.json"))
    assert (done.returncode, done.stderr) == (0, "")
    (run,) = json.loads((tmp_path / "x.json").read_text())["runs"]
    assert run["input_sequence_length"]["avg"] == pytest.approx(60 + 4, abs=5)
    assert run["client"]["lateness"]["count"] == 30


def test_a_chat_outlives_its_server(demo_engine: Path, tmp_path: Path) -> None:
    first = start_server(str(demo_engine))
    port = first.ports["GRPCInferenceService"]
    with chat_terminal(first.grpc, tmp_path, "--no-markdown") as terminal:
        terminal.ask(QUESTION, f"{ANSWER}\r\n")
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(timeout=60) == 0
        terminal.ask("Hello", "waiting for it; the conversation is kept")
        second = start_server(str(demo_engine), "--grpc-port", str(port))
        try:
            terminal.wait_for("the server is back")
            terminal.wait_for("you> ")
            terminal.ask("/undo", "forgotten: Hello")
            terminal.ask("/retry", "you> ")
            terminal.ask("/undo", "forgotten: Hello")
            terminal.ask("/undo", f"forgotten: {QUESTION}")
        finally:
            second.process.kill()
            second.process.wait()
        terminal.ask("Anybody?", "waiting for it")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("/retry asks again")
        terminal.type("/quit\n")
        assert terminal.process.wait(timeout=20) == 0


def test_structured_output_and_log_probs_in_a_chat(server: ServerProcess, tmp_path: Path) -> None:
    with chat_terminal(server.grpc, tmp_path) as terminal:
        terminal.ask("/params guide=regex:(yes|no) log_probs=on", "log_probs=on")
        terminal.ask("Is it closed?", "least sure: ")
        assert "yes\r\n" in terminal.shown or "no\r\n" in terminal.shown
        terminal.ask("/params guide= log_probs=", "max_tokens=256")
        terminal.ask("/clear", "forgotten")
        terminal.ask(QUESTION, f"{ANSWER}\r\n")
        terminal.ask("/model tok\t\n/model", "there are: ensemble")


def test_an_api_key_is_asked_for_by_its_flag(demo_engine: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n  - name: me\n    key: sk-right-0123456789\n")
    server = start_server(str(demo_engine), "--api-keys", str(keys))
    try:
        url = f"grpc://{server.grpc}"
        for key, words in ((), "requires an API key"), (("--api-key", "sk-wrong-01234567"), "requires another API key"):
            done = llmserve("chat", "--url", url, "--once", "x", *key)
            assert done.returncode == 2
            assert f"error: {server.grpc} {words}: give it with --api-key KEY or in LLMSERVE_API_KEY" in done.stderr
        right = llmserve("chat", "--url", url, "--once", QUESTION, "--api-key", "sk-right-0123456789")
        assert (right.returncode, right.stdout) == (0, f"{ANSWER}\n")
        load = ("--requests", "4", "--input-tokens", "8", "--output-tokens", "2")
        assert llmserve("bench", "--url", server.http, *load).returncode == 2
        assert llmserve("bench", "--url", server.http, *load, "--api-key", "sk-right-0123456789").returncode == 0
    finally:
        server.process.kill()
        server.process.wait()
