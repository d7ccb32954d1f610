"""`llmserve build --prefix`, `llmserve prefix`, and a server whose first request finds what they computed."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI, omit
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from tests.e2e.conftest import CHECKPOINT, ServerProcess, llmserve, start_server

SYSTEM: ChatCompletionMessageParam = {
    "role": "system",
    "content": "You write documentation. Summarize each text that you are given in one sentence, name what is returned "
    "and what is raised, and leave out everything that is not said there. Do not repeat the text, and do not mention "
    "this rule. " * 2,
}
QUESTION: ChatCompletionMessageParam = {"role": "user", "content": "The connection is closed. Any data is sent before."}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prefix")
    (folder / "system.json").write_text(json.dumps([SYSTEM]))
    arguments = ("--dtype", "float16", "--prefix", str(folder / "system.json"), "--output-dir", str(folder / "engine"))
    done = llmserve("build", str(CHECKPOINT), *arguments)
    assert done.returncode == 0, done.stderr
    assert "system.json: " in done.stdout
    return folder


@pytest.fixture(scope="module")
def fresh(prepared: Path, demo_engine: Path) -> Iterator[ServerProcess]:
    """Where the same engine drafts, too."""
    server = start_server(str(prepared / "engine"), "--draft-engine", str(demo_engine))
    yield server
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=60) == 0


def asked(
    server: ServerProcess, *messages: ChatCompletionMessageParam, prediction: str | None = None
) -> ChatCompletion:
    with OpenAI(base_url=f"{server.http}/v1", api_key="none") as client:
        return client.chat.completions.create(
            model="ensemble", messages=messages, max_tokens=24, temperature=0, logprobs=True,
            prediction={"type": "content", "content": prediction} if prediction else omit,
        )  # fmt: skip


def test_the_first_request_of_a_fresh_server_finds_them(server: ServerProcess, fresh: ServerProcess) -> None:
    cold, found = asked(server, SYSTEM, QUESTION), asked(fresh, SYSTEM, QUESTION)
    assert found.choices == cold.choices
    assert found.usage is not None
    assert cold.usage is not None
    assert found.usage.prompt_tokens_details is not None
    assert (found.usage.prompt_tokens_details.cached_tokens or 0) >= 64
    assert not (cold.usage.prompt_tokens_details and cold.usage.prompt_tokens_details.cached_tokens)


def test_what_the_client_predicts_is_accepted(server: ServerProcess) -> None:
    plain = asked(server, QUESTION)
    made = asked(server, QUESTION, prediction=plain.choices[0].message.content)
    assert made.choices == plain.choices
    assert made.usage is not None
    assert made.usage.completion_tokens_details is not None
    assert (made.usage.completion_tokens_details.accepted_prediction_tokens or 0) > 0


def test_prefixes_are_replaced_and_shown(prepared: Path, tmp_path: Path) -> None:
    engine, text = str(shutil.copytree(prepared / "engine", tmp_path / "engine")), tmp_path / "text.txt"
    text.write_text("Summarize the following text in one sentence, and do not repeat it. " * 4)
    done = llmserve("prefix", engine, "--text", str(text))
    assert done.returncode == 0, done.stderr
    assert "text.txt: " in done.stdout
    shown = llmserve("inspect", engine, "--verify")
    assert shown.returncode == 0
    assert "sealed prefixes" in shown.stdout
    refused = llmserve("prefix", engine)
    assert refused.returncode == 2
    assert "no prefix; give --messages system.json or --text system.txt" in refused.stderr
