"""Bodies of one problem many times: telling it costs far more than the bytes that cause it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from llmserve.errors import InvalidArgument
from llmserve.frontends.text.answers.failures import Refused
from llmserve.frontends.text.anthropic.fields import MessagesRequest
from llmserve.frontends.text.ollama.fields import OllamaChatRequest, OllamaGenerateRequest
from llmserve.frontends.text.openai.chat_fields import ChatRequest
from llmserve.frontends.text.openai.completions import CompletionRequest
from llmserve.frontends.text.openai.models import DetokenizeRequest, TokenizeRequest
from llmserve.frontends.text.openai.response_fields import ResponseRequest
from llmserve.frontends.text.requests import validation
from llmserve.frontends.text.requests.fields import MAX_MESSAGES
from llmserve.frontends.text.requests.tools import Choice, Function, tool_use
from llmserve.stages.json_values import MAX_VALUES

MANY = 2000
FEW = 16
UNKNOWN = {str(number): 1 for number in range(MANY)}
CALL = {"id": "a", "function": {"name": 1}}


def said(role: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, **more}]}


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (ResponseRequest, {"input": [{}] * MANY}),
        (ResponseRequest, {"input": [{"role": "user", "content": [{}] * MANY}]}),
        (ResponseRequest, {"input": [{"type": "reasoning", "content": [1] * MANY}]}),
        (ResponseRequest, {"input": [{"type": "never"}] * MANY}),
        (ResponseRequest, {"input": "x", "metadata": UNKNOWN}),
        (CompletionRequest, {"prompt": [-1] * MANY}),
        (CompletionRequest, {"prompt": [[-1]] * MANY}),
        (CompletionRequest, {"prompt": [[-1] * MANY]}),
        (CompletionRequest, {"prompt": [None] * MANY}),
        (CompletionRequest, {"prompt": "x", "logit_bias": dict.fromkeys(UNKNOWN, "x")}),
        (CompletionRequest, {"prompt": "x", "stop": [1] * MANY}),
        (CompletionRequest, {"prompt": "x", **UNKNOWN}),
        (ChatRequest, {"messages": [{}] * MANY}),
        (ChatRequest, {"messages": [{"role": "user"}] * MANY}),
        (ChatRequest, said("user", content=[{}] * MANY)),
        (ChatRequest, said("assistant", tool_calls=[CALL] * MANY)),
        (ChatRequest, said("user", content="x", **UNKNOWN)),
        (ChatRequest, {**said("user", content="x"), "tools": [{}] * MANY}),
        (TokenizeRequest, {"messages": [{}] * MANY}),
        (DetokenizeRequest, {"tokens": [-1] * MANY}),
        (MessagesRequest, {"messages": [{}] * MANY, "max_tokens": 1}),
        (MessagesRequest, {**said("user", content=[{"type": "text"}] * MANY), "max_tokens": 1}),
        (MessagesRequest, {**said("user", content="x"), "max_tokens": 1, "system": [{}] * MANY}),
        (OllamaChatRequest, {"messages": [{}] * MANY}),
        (OllamaChatRequest, said("user", tool_calls=[{}] * MANY)),
        (OllamaGenerateRequest, {"prompt": "x", "options": UNKNOWN}),
    ],
)
def test_each_problem_is_told_once(model: type[BaseModel], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        model.model_validate({"model": "m", **fields})
    assert refused.value.error_count() <= FEW


def test_conversations_have_a_limit() -> None:
    messages = [{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1)
    with pytest.raises(ValidationError, match=f"has {MAX_MESSAGES + 1} entries, more than {MAX_MESSAGES}"):
        ChatRequest.model_validate({"model": "m", "messages": messages})


def test_what_one_item_lacks_is_told_whole() -> None:
    with pytest.raises(ValidationError) as refused:
        ResponseRequest.model_validate({"model": "m", "input": [{"type": "function_call"}, {}]})
    told = {problem["loc"][-1] for problem in refused.value.errors() if "function_call" in problem["loc"]}
    assert told == {"call_id", "name", "arguments"}


@pytest.mark.parametrize("value", ["{}", "[]", "-1", '"x"', "1e5"])
def test_documents_of_very_many_values_are_not_read(value: str) -> None:
    values = ",".join([value] * (MAX_VALUES + 1))
    with pytest.raises(InvalidArgument, match=f"JSON values, more than {MAX_VALUES}"):
        validation._num_values(b'{"a": [%b]}' % values.encode())


@pytest.mark.parametrize(
    "text", [',[{"' * MAX_VALUES, '\\",' * MAX_VALUES, "\\\\," * MAX_VALUES, '\\\\\\",' * MAX_VALUES]
)
def test_values_in_strings_are_none(text: str) -> None:
    assert validation._num_values(json.dumps({"a": text, "b": [1, 2]}).encode()) == 5


def test_numbers_that_are_too_large_are_no_json() -> None:
    with pytest.raises(InvalidArgument, match="1e999 is too large for a number"):
        validation._document(b'{"a": [1e999, 1e999]}')


def test_schemas_of_tools_have_a_limit() -> None:
    schema = {"type": "object", "properties": {str(number): {"type": "string"} for number in range(20_000)}}
    with pytest.raises(Refused, match="bytes of JSON; the maximum"):
        tool_use([Function.model_validate({"name": "a", "parameters": schema})], Choice(), several=True)
