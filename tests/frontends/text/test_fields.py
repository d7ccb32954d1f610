"""What an ensemble is asked for a request's fields."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from llmserve.frontends.text.openai.chat_fields import ChatRequest
from llmserve.frontends.text.openai.completions import CompletionRequest
from llmserve.frontends.text.openai.response_fields import ResponseRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def values(**fields: Any) -> dict[str, Any]:
    body = CompletionRequest.model_validate({"model": "m", "prompt": "x", "temperature": 0, **fields})
    return dict(body.sampling(16, 1, {}).values())


def test_what_a_request_does_not_say_is_not_asked() -> None:
    assert values() == {"max_tokens": [16]}
    assert values(presence_penalty=0, repetition_penalty=1, stop=None, n=1, ignore_eos=False) == values()


def test_a_draw_is_asked_for_by_top_p() -> None:
    drawn = values(temperature=0.5, seed=-1)
    assert drawn == {"max_tokens": [16], "temperature": [0.5], "top_p": [1.0], "seed": [2**64 - 1]}
    assert values(temperature=1.0, top_k=-1, seed=3).keys() == {"max_tokens", "temperature", "top_p", "seed"}


@pytest.mark.parametrize(
    ("wanted", "guide"),
    [
        ({"type": "text"}, {}),
        ({"type": "json_object"}, {"guided_decoding_guide_type": ["json"]}),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
            {"guided_decoding_guide_type": ["json_schema"], "guided_decoding_guide": [json.dumps(SCHEMA)]},
        ),
    ],
)
def test_a_format_is_a_guide(wanted: dict[str, Any], guide: dict[str, Any]) -> None:
    assert values(response_format=wanted) == {"max_tokens": [16], **guide}
    text = {"type": "json_schema", **wanted["json_schema"]} if "json_schema" in wanted else wanted
    response = ResponseRequest.model_validate({"model": "m", "input": "x", "text": {"format": text}, "temperature": 0})
    assert response.talk().schema == {"json_schema": SCHEMA, "json_object": {"type": "object"}}.get(wanted["type"])


@pytest.mark.parametrize(
    ("wanted", "kind", "guide"),
    [
        ({"regex": "[a-z]+"}, "regex", "[a-z]+"),
        ({"grammar": 'root ::= "a"'}, "ebnf_grammar", 'root ::= "a"'),
        ({"json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
    ],
)
def test_vllms_words_for_a_format(wanted: dict[str, Any], kind: str, guide: str) -> None:
    found = values(structured_outputs=wanted)
    assert found == {"max_tokens": [16], "guided_decoding_guide_type": [kind], "guided_decoding_guide": [guide]}
    assert values(structured_outputs=wanted, response_format={"type": "text"}) == found


def test_a_schema_in_vllms_words_is_one_for_a_chat_too() -> None:
    fields = {"model": "m", "messages": [{"role": "user", "content": "x"}], "structured_outputs": {"json": SCHEMA}}
    assert ChatRequest.model_validate(fields).talk().schema == SCHEMA
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    with pytest.raises(ValidationError, match="structured_outputs and tools both say"):
        ChatRequest.model_validate(fields | {"tools": [tool]})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"structured_outputs": {}}, "give one of json, regex and grammar"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "give one of json, regex and grammar"),
        ({"structured_outputs": {"regex": ""}}, "at least 1 character"),
        ({"structured_outputs": {"choice": ["a"]}}, "Extra inputs are not permitted"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "give one"),
    ],
)
def test_a_format_is_said_once(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        values(**fields)
