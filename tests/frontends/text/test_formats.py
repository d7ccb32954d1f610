"""Answers in a form that the request asks for, in every server's words, over the real guides."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.frontends.text.test_enforced_tools import real_talker

MODEL = "ensemble"
MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
}
CHOICES = ["yes", "no"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Of an engine with random weights."""
    with (
        real_talker(tmp_path_factory.mktemp("formats"), "qwen") as server,
        openai.OpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"guided_choice": CHOICES}, "yes|no"),
        ({"structured_outputs": {"choice": CHOICES}}, "yes|no"),
        ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
        ({"guided_grammar": 'root ::= "x" | "y"'}, "x|y"),
        ({"grammar": 'root ::= "x" | "y"'}, "x|y"),
        ({"guided_json": SCHEMA | {"additionalProperties": False}}, r'\{\s*"a"\s*:\s*\d\s*\}'),
        ({"json_schema": SCHEMA | {"additionalProperties": False}}, r'\{\s*"a"\s*:\s*\d\s*\}'),
    ],
)
def test_other_servers_words(client: openai.OpenAI, fields: dict[str, Any], form: str) -> None:
    for seed in range(3):
        chat = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=64, seed=seed, extra_body=fields
        )
        text = client.completions.create(model=MODEL, prompt="Hello", max_tokens=64, seed=seed, extra_body=fields)
        for answer, reason in (
            (chat.choices[0].message.content or "", chat.choices[0].finish_reason),
            (text.choices[0].text, text.choices[0].finish_reason),
        ):
            assert reason == "stop", answer
            assert re.fullmatch(form, answer), answer


def test_a_strict_schema_has_no_other_names(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    for seed in range(5):
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=64, seed=seed, response_format=form
        )
        assert list(json.loads(answer.choices[0].message.content or "")) == ["a"]


def test_a_guide_that_cannot_be_followed_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot be followed"):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={"guided_regex": "["})
