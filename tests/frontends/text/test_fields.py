"""What an ensemble is asked for a request's fields."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from llmserve.frontends.text.answers.failures import Refused
from llmserve.frontends.text.openai.chat_fields import ChatRequest
from llmserve.frontends.text.openai.completions import CompletionRequest
from llmserve.frontends.text.openai.response_fields import ResponseRequest
from llmserve.frontends.text.requests.formats import closed

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**SCHEMA, "additionalProperties": False}


def values(**fields: Any) -> dict[str, Any]:
    body = CompletionRequest.model_validate({"model": "m", "prompt": "x", "temperature": 0, **fields})
    return dict(body.sampling(16, 1, {}).values())


def test_what_a_request_does_not_say_is_not_asked() -> None:
    assert values() == {"max_tokens": [16]}
    assert values(presence_penalty=0, repetition_penalty=1, stop=None, n=1, ignore_eos=False) == values()


def test_a_draw_is_asked_for_by_top_p() -> None:
    drawn = values(temperature=0.5, seed=-2)
    assert drawn == {"max_tokens": [16], "temperature": [0.5], "top_p": [1.0], "seed": [2**64 - 2]}
    assert values(temperature=1.0, top_k=-1, seed=3).keys() == {"max_tokens", "temperature", "top_p", "seed"}


@pytest.mark.parametrize(
    ("wanted", "guide"),
    [
        ({"type": "text"}, {}),
        ({"type": "json_object"}, {"guided_decoding_guide_type": ["json"]}),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
            {"guided_decoding_guide_type": ["json_schema"], "guided_decoding_guide": [json.dumps(CLOSED)]},
        ),
    ],
)
def test_a_format_is_a_guide(wanted: dict[str, Any], guide: dict[str, Any]) -> None:
    assert values(response_format=wanted) == {"max_tokens": [16], **guide}
    text = {"type": "json_schema", **wanted["json_schema"]} if "json_schema" in wanted else wanted
    response = ResponseRequest.model_validate({"model": "m", "input": "x", "text": {"format": text}, "temperature": 0})
    assert response.talk().schema == {"json_schema": CLOSED, "json_object": {"type": "object"}}.get(wanted["type"])


@pytest.mark.parametrize(
    ("wanted", "kind", "guide"),
    [
        ({"regex": "[a-z]+"}, "regex", "[a-z]+"),
        ({"grammar": 'root ::= "a"'}, "ebnf_grammar", 'root ::= "a"'),
        ({"json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"json": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
        ({"json": SCHEMA, "disable_additional_properties": True}, "json_schema", json.dumps(CLOSED)),
        ({"choice": ["a", '"b"', "a"]}, "ebnf_grammar", r'start: "a" | "\"b\""'),
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
    with pytest.raises(ValidationError, match="structured_outputs and tools both set"):
        ChatRequest.model_validate(fields | {"tools": [tool]})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"structured_outputs": {}}, "give one of json, regex, choice, grammar and json_object"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "give one of json, regex"),
        ({"structured_outputs": {"regex": ""}}, "at least 1 character"),
        ({"structured_outputs": {"choice": []}}, "at least 1 item"),
        ({"structured_outputs": {"structural_tag": {}}}, "structural tags are not supported"),
        ({"guided_json": "{"}, "a schema given as a string must be JSON"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_json and guided_regex both set"),
        ({"grammar": 'root ::= "a"', "response_format": {"type": "json_object"}}, "response_format and grammar both"),
        ({"response_format": {"type": "json_schema"}}, "give json_schema, or llama.cpp's schema"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "give only one"),
    ],
)
def test_a_format_is_said_once(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        values(**fields)


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"structured_outputs": {"json_object": True}}, {"response_format": {"type": "json_object"}}),
        ({"guided_json": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
        ({"guided_json": json.dumps(SCHEMA)}, {"structured_outputs": {"json": SCHEMA}}),
        ({"guided_regex": "[a-z]"}, {"structured_outputs": {"regex": "[a-z]"}}),
        ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
        ({"guided_grammar": 'root ::= "a"'}, {"structured_outputs": {"grammar": 'root ::= "a"'}}),
        ({"grammar": 'root ::= "a"'}, {"structured_outputs": {"grammar": 'root ::= "a"'}}),
        ({"json_schema": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"structured_outputs": {"json": SCHEMA}}),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, {"structured_outputs": {"json": SCHEMA}}),
    ],
)
def test_a_format_may_be_said_in_other_servers_words(fields: dict[str, Any], same: dict[str, Any]) -> None:
    assert values(**fields) == values(**same)
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    assert (
        ChatRequest.model_validate(chat | fields).talk().schema == ChatRequest.model_validate(chat | same).talk().schema
    )


@pytest.mark.parametrize(
    ("schema", "strict"),
    [
        (SCHEMA, CLOSED),
        (
            {**SCHEMA, "additionalProperties": {"type": "string"}},
            {**SCHEMA, "additionalProperties": {"type": "string"}},
        ),
        ({"type": "object"}, {"type": "object"}),  # of any names
        ({"type": "array", "items": SCHEMA}, {"type": "array", "items": CLOSED}),
        (
            {"$defs": {"properties": SCHEMA}, "$ref": "#/$defs/x"},
            {"$defs": {"properties": CLOSED}, "$ref": "#/$defs/x"},
        ),
        ({"anyOf": [SCHEMA, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [SCHEMA, {"type": "object", "properties": {"b": {}}}]},) * 2,  # parts of one object
        ({"allOf": [SCHEMA]}, {"allOf": [CLOSED]}),
        ({"const": SCHEMA}, {"const": SCHEMA}),
        ({"properties": {"properties": {}}}, {"properties": {"properties": {}}, "additionalProperties": False}),
    ],
)
def test_objects_of_a_strict_schema_are_closed(schema: dict[str, Any], strict: dict[str, Any]) -> None:
    assert closed(schema) == strict
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
    fields = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    if schema.get("type") == "object":
        (found,) = ChatRequest.model_validate(fields).talk().tools.tools()
        assert found.parameters == strict


def test_too_deep_a_schema_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(Refused, match="nested too deeply"):
        closed(deep)
