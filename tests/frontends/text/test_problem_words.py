"""What a client is told of a wrong body: its own names, in plain words."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
FOREIGN = ("Input should", "should have", "Field required", "valid string", "valid dictionary", "instance of", "[")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "temperature: must be at most 2.0"),
        ({"temperature": "1"}, "temperature: must be a number"),
        ({"top_p": 0}, "top_p: must be greater than 0.0"),
        ({"n": 0}, "n: must be at least 1"),
        ({"n": 1.5}, "n: must be an integer"),
        ({"stream": "yes"}, "stream: must be true or false"),
        ({"messages": []}, "messages: must have 1 or more entries"),
        ({"messages": {}}, "messages: must be a list"),
        ({"messages": [{"role": "user"}]}, "messages.0.user.content: is missing"),
        ({"messages": [{"content": "x"}]}, "messages.0: 'role' is missing"),
        ({"messages": [{"role": "x", "content": "x"}]}, "messages.0: 'role' must be one of 'system', 'developer'"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.user.content: must be a string"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}}, "schema: must be an object"),
        ({"guided_regex": ""}, "guided_regex: must have 1 or more characters"),
        ({"user": 7}, "user: must be a string"),
        ({"parallel_tool_calls": 1, "seed": "x"}, "seed: must be an integer"),
    ],
)
def test_problems_are_told_in_plain_words(http: httpx.Client, fields: dict[str, Any], message: str) -> None:
    answer = http.post("/v1/chat/completions", json={**CHAT, **fields})
    assert answer.status_code == 400
    told = answer.json()["error"]["message"]
    assert message in told
    assert not any(words in told for words in FOREIGN), told
