"""Answers of a real server, derived again by `llmserve verify`: true ones and forged ones."""

from __future__ import annotations

import asyncio
import copy
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmserve.client import AsyncClient
from tests.e2e.conftest import ServerProcess, llmserve

MODEL = "ensemble"
CHAT = [{"role": "user", "content": "Summarize:\nReturn the largest item of the list, or None if there is none."}]
TEXT = "Summarize: Open the file and read all of its lines."
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("chat/completions", {"messages": CHAT, "temperature": 0, "max_tokens": 24}),
    "drawn": ("chat/completions", {"messages": CHAT, "temperature": 1.2, "top_p": 0.9, "n": 3, "max_tokens": 24}),
    "penalties": (
        "completions",
        {"prompt": TEXT, "max_tokens": 24, "frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.1,
         "min_p": 0.02, "seed": 11, "logit_bias": {"300": 2.5, "301": -100}, "min_tokens": 4},
    ),
    "echo": ("completions", {"prompt": TEXT, "echo": True, "temperature": 0, "max_tokens": 12}),
    "batch": ("completions", {"prompt": [TEXT, "def add(a, b):"], "n": 2, "best_of": 3, "seed": 3, "max_tokens": 9}),
    "stop": ("completions", {"prompt": TEXT, "temperature": 0, "stop": ["e"], "max_tokens": 30, "ignore_eos": True}),
    "guide": (
        "chat/completions",
        {"messages": CHAT, "temperature": 1.5, "structured_outputs": {"regex": "[a-z]{3,8} [0-9]{2}"}},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(server: ServerProcess) -> dict[str, Any]:
    """All of them asked at the same time, so that they share steps."""

    def ask(asked: tuple[str, dict[str, Any]]) -> Any:
        route, body = asked
        reply = httpx.post(
            f"{server.http}/v1/{route}", json={"model": MODEL, "return_receipt": True, **body}, timeout=60
        )
        assert reply.status_code == 200, reply.text
        return reply.json()

    with ThreadPoolExecutor(len(ASKED)) as pool:
        return dict(zip(ASKED, pool.map(ask, ASKED.values()), strict=True))


@pytest.fixture
def verify(demo_engine: Path, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    def run(answer: object, engine: Path = demo_engine, **env: str) -> tuple[int, str]:
        path = tmp_path / "answer.json"
        path.write_text(json.dumps(answer))
        done = llmserve("verify", str(path), "--engine", str(engine), env={**os.environ, **env})
        return done.returncode, done.stdout + done.stderr

    return run


def test_what_was_said_is_found_again(answers: dict[str, Any], verify: Callable[..., tuple[int, str]]) -> None:
    code, told = verify(list(answers.values()))
    assert code == 0, told
    lines = told.splitlines()
    assert len(lines) == sum(len(answer["choices"]) for answer in answers.values()) == 12
    assert all(": said: demo-fp16 gives the same " in line and line.endswith("and their text") for line in lines), told
    seeds = {choice["receipt"]["sampling"]["seed"] for choice in answers["drawn"]["choices"]}
    assert len(seeds) == 1
    assert seeds != {0}


def test_streams_and_the_other_protocols_have_receipts_too(
    server: ServerProcess, answers: dict[str, Any], verify: Callable[..., tuple[int, str]]
) -> None:
    route, body = ASKED["greedy"]
    asked = {"model": MODEL, "return_receipt": True, "stream": True, **body}
    with httpx.stream("POST", f"{server.http}/v1/{route}", json=asked, timeout=60) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    assert [("receipt" in chunk["choices"][0]) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    inputs = {"text_input": TEXT, "max_tokens": 10, "return_receipt": True, "exclude_input_in_output": True}
    generated = httpx.post(f"{server.http}/v2/models/{MODEL}/generate", json=inputs, timeout=60).json()
    delta = asyncio.run(_last_delta(server))
    code, told = verify([chunks[-1], generated, json.loads(delta)])
    assert code == 0, told
    whole = answers["greedy"]["choices"][0]["receipt"]
    assert chunks[-1]["choices"][0]["receipt"] == whole
    assert ["there is no text to compare" in line for line in told.splitlines()] == [True, False, True]


async def _last_delta(server: ServerProcess) -> str:
    async with AsyncClient(server.grpc) as client:
        deltas = [delta async for delta in client.generate(CHAT, max_tokens=9, temperature=0.0, return_receipt=True)]
    assert [bool(delta.receipt) for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    return deltas[-1].receipt


def test_nobody_gets_a_receipt_unasked(server: ServerProcess) -> None:
    route, body = ASKED["greedy"]
    for more in ({}, {"return_receipt": False}):
        reply = httpx.post(f"{server.http}/v1/{route}", json={"model": MODEL, **body, **more}, timeout=60).json()
        assert "receipt" not in reply["choices"][0]


def _with(answer: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    forged = copy.deepcopy(answer)
    change(forged["choices"][0])
    return forged


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "text": (lambda choice: choice["message"].update(content="Everything is fine."), "the text differs"),
    "token": (lambda choice: choice["receipt"]["output_ids"].__setitem__(1, 5), "token 2 of "),
    "shorter": (lambda choice: choice["receipt"]["output_ids"].pop(), "tokens in the file, but "),
    "prompt": (lambda choice: choice["receipt"]["prompt_ids"].__setitem__(-2, 400), " from this engine"),
    "seed": (lambda choice: choice["receipt"]["sampling"].update(seed=99), " from this engine"),
    "temperature": (lambda choice: choice["receipt"]["sampling"].update(temperature=0.1), " from this engine"),
    "reason": (lambda choice: choice["receipt"].update(finish_reason="stop_words"), "it ended with stop_words there"),
    "engine": (lambda choice: choice["receipt"]["engine"].update(digest="a" * 64), "digest aaaaaaaaaaaa, but this"),
    "vocabulary": (
        lambda choice: choice["receipt"]["prompt_ids"].append(10**6),
        "this engine cannot answer that request",
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_what_was_never_said_is_not(
    forgery: str, answers: dict[str, Any], verify: Callable[..., tuple[int, str]]
) -> None:
    change, words = FORGERIES[forgery]
    code, told = verify(_with(answers["drawn"], change))
    first, *others = told.splitlines()
    assert code == 1, told
    assert first.startswith("choices[0]: not said: ")
    assert words in first
    assert len(others) == 2
    assert all(": said: " in line for line in others)


def test_another_instruction_set_cannot_call_anybody_a_liar(
    answers: dict[str, Any], verify: Callable[..., tuple[int, str]]
) -> None:
    change, _ = FORGERIES["token"]
    code, told = verify(_with(answers["greedy"], change), LLMSERVE_ISA="portable")
    assert code == 1
    assert told.startswith("choices[0]: unknown: token 2 of ")
    assert "but here with portable, which may round" in told


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ('{"choices": [{"text": "hello"}]}', 'has no receipt; ask for one with "return_receipt"'),
        ('{"choices": [{"receipt": {"format": 7}}]}', "choices[0]: not a receipt of format 1: its format is 7"),
        ('{"text_output": "a", "receipt": "{"}', "answer: "),
        ("5", "has no receipt"),
    ],
)
def test_a_file_without_a_receipt_is_refused(content: str, words: str, demo_engine: Path, tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    path.write_text(content)
    done = llmserve("verify", str(path), "--engine", str(demo_engine))
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_an_engine_whose_bytes_changed_says_nothing(
    answers: dict[str, Any], demo_engine: Path, tmp_path: Path, verify: Callable[..., tuple[int, str]]
) -> None:
    other = tmp_path / "changed"
    other.mkdir()
    for file in demo_engine.iterdir():
        content = bytearray(file.read_bytes())
        if file.name == "rank0.engine":
            content[-5] ^= 1
        (other / file.name).write_bytes(content)
    code, told = verify(answers["greedy"], engine=other)
    assert code != 0
    assert "rank0.engine was changed" in told
