"""Bodies of the OpenAI, Anthropic and Ollama APIs that have very many problems, or very many values."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.hostile.attacks import post_to, send, status, works
from tests.hostile.conftest import Target, full_only

BODY = 4 * 1024 * 1024 - 1024  # the most that these APIs read
HEAD = '{"model": "m", "max_tokens": 1, '


def many(value: str, before: str, behind: str, size: int = BODY) -> bytes:
    return (HEAD + before + ",".join([value] * (size // (len(value) + 1))) + behind + "}").encode()


def members(before: str, behind: str, size: int) -> bytes:
    return (HEAD + before + ",".join(f'"{number}":""' for number in range(size // 12)) + behind + "}").encode()


FEWER = BODY // 16  # as many values as are read
ATTACKS: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "responses": ("/v1/responses", lambda size: many("{}", '"input": [', "]", size)),
    "prompt ids": ("/v1/completions", lambda size: many("-1", '"prompt": [', "]", size)),
    "lists of ids": ("/v1/completions", lambda size: many("[-1]", '"prompt": [', "]", size)),
    "biases": ("/v1/completions", lambda size: members('"prompt": "x", "logit_bias": {', "}", size)),
    "unknown fields": ("/v1/chat/completions", lambda size: members("", "", size)),
    "messages": ("/v1/chat/completions", lambda size: many("{}", '"messages": [', "]", size)),
    "parts": (
        "/v1/chat/completions",
        lambda size: many("{}", '"messages": [{"role": "user", "content": [', "]}]", size),
    ),
    "turns": ("/v1/messages", lambda size: many("{}", '"messages": [', "]", size)),
    "messages of Ollama": ("/api/chat", lambda size: many("{}", '"messages": [', "]", size)),
    "messages to be counted": ("/tokenize", lambda size: many("{}", '"messages": [', "]", size)),
    "biases in pairs": (
        "/completion",
        lambda size: many('["a",1000]', '"prompt": "x", "logit_bias": [', "]", size),
    ),
    "a prompt in pieces": ("/completion", lambda size: many("-1", '"prompt": [', "]", size)),
    "ids to be read": ("/detokenize", lambda size: many("-1", '"tokens": [', "]", size)),
}  # fmt: skip


@pytest.mark.parametrize("size", [FEWER, BODY])
@pytest.mark.parametrize("what", full_only("lists of ids", "parts", "turns", "messages of Ollama", among=ATTACKS))
def test_many_problems(target: Target, what: str, size: int) -> None:
    path, make = ATTACKS[what]
    body = make(size)
    send(target.http_port, post_to(path, b"{}"))  # the application is made when it is first asked
    with target.watched():
        answer = send(target.http_port, post_to(path, body))
    assert status(answer) == 400, answer[:300]
    assert len(answer) < 10_000
    assert works(target.http_port, target.grpc_port)


def test_a_text_of_the_same_size_is_read(target: Target) -> None:
    """Of which the model's name is the only problem."""
    body = json.dumps({"model": "m", "prompt": ",[{" * (BODY // 3 - 100)}).encode()
    with target.watched():
        answer = send(target.http_port, post_to("/v1/completions", body))
    assert status(answer) == 404, answer[:300]
