"""What a client says that changes no answer: taken and named in the answer, unless a server refuses it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from llmserve.frontends.shared.text_settings import TextSettings
from tests.frontends.server import RunningServer
from tests.frontends.text.conftest import serving

MODEL = "ensemble"
MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "max_tokens": 4}
RESPONSE: dict[str, Any] = {"model": MODEL, "input": "Hello", "max_output_tokens": 4}
MESSAGE: dict[str, Any] = CHAT
PATHS = {
    "/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/v1/responses": RESPONSE, "/v1/messages": MESSAGE,
    "/api/chat": {"model": MODEL, "messages": MESSAGES, "stream": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def tolerant(text_dir: Path) -> Iterator[RunningServer]:
    with serving(text_dir, text=TextSettings()) as running:
        yield running


@pytest.fixture(scope="module")
def tolerant_http(tolerant: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tolerant.http_url, timeout=60) as made:
        yield made


# path, what is said besides, the warning; empty: there is none
TAKEN = [
    ("/v1/chat/completions", {"temprature": 1}, "temprature: unknown field; did you mean 'temperature'?"),
    ("/v1/chat/completions", {"zzzz": {"a": [1]}}, "zzzz: unknown field, ignored"),
    ("/v1/chat/completions", {"messages": [{**MESSAGES[0], "name": "Ann"}]}, "name: names of participants"),
    ("/v1/chat/completions", {"messages": [{**MESSAGES[0], "id": 7}]}, "id: unknown field, ignored"),
    ("/v1/chat/completions", {"messages": [{**MESSAGES[0], "cache_control": {"type": "ephemeral"}}]}, ""),
    ("/v1/chat/completions", {"max_tokens": None, "max_completion_tokens": 4, "stop": ""}, ""),
    ("/v1/chat/completions", {"max_tokens": -1, "max_completion_tokens": 4, "stop": ["", "zz"]}, ""),
    ("/v1/chat/completions", {"stream_options": {"include_usage": True}}, "stream_options: no effect without stream"),
    ("/v1/chat/completions", {"store": True, "metadata": {"a": "b"}, "user": "u"}, "store: this server does not store"),
    ("/v1/chat/completions", {"service_tier": "flex", "verbosity": "low"}, "verbosity: not supported"),
    ("/v1/chat/completions", {"reasoning_effort": "high"}, "reasoning_effort: this model does not reason"),
    ("/v1/chat/completions", {"top_logprobs": 0, "prompt_cache_retention": "24h"}, ""),
    ("/v1/completions", {"max_tokens": 4, "zzzz": 1}, "zzzz: unknown field, ignored"),
    ("/v1/responses", {"store": True, "include": ["reasoning.encrypted_content"]}, "include: reasoning.encrypted"),
    ("/v1/responses", {"truncation": "auto", "max_tool_calls": 3}, "max_tool_calls: "),
    ("/v1/responses", {"reasoning": {"effort": "low", "summary": "detailed"}}, "summary: thoughts"),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking: this model does not reason"),
    ("/v1/messages", {"context_management": {"edits": []}, "mcp_servers": []}, "context_management: "),
    ("/api/chat", {"zzzz": 1}, "zzzz: unknown field, ignored"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more", "warning"), TAKEN)
def test_what_changes_no_answer_is_taken_and_named(
    tolerant_http: httpx.Client, path: str, more: dict[str, Any], warning: str
) -> None:
    answer = tolerant_http.post(path, json={**PATHS[path], **more})
    assert answer.status_code == 200, answer.text
    assert warning in answer.json().get("warning", "")
    if not warning:
        assert "warning" not in answer.json()


@pytest.mark.parametrize(("path", "more", "warning"), [case for case in TAKEN if case[2]])
def test_a_strict_server_refuses_the_same(http: httpx.Client, path: str, more: dict[str, Any], warning: str) -> None:
    answer = http.post(path, json={**PATHS[path], **more})
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"web_search_options": {}}),
        ("/v1/chat/completions", {"temperature": "1", "zzzz": 1}),
        ("/v1/chat/completions", {"modalities": ["audio"]}),
        ("/v1/chat/completions", {f"x{number}": 1 for number in range(100)}),
        ("/v1/completions", {"suffix": "x"}),
        ("/v1/responses", {"previous_response_id": "resp_1"}),
        ("/v1/messages", {"mcp_servers": [{"name": "x"}]}),
    ],
)
def test_what_would_change_an_answer_is_still_refused(
    tolerant_http: httpx.Client, path: str, more: dict[str, Any]
) -> None:
    assert tolerant_http.post(path, json={**PATHS[path], **more}).status_code == 400


def test_the_next_request_has_no_warning_of_the_last(tolerant_http: httpx.Client) -> None:
    path = "/v1/chat/completions"
    assert "warning" in tolerant_http.post(path, json={**CHAT, "zzzz": 1}).json()
    assert "warning" not in tolerant_http.post(path, json=CHAT).json()


def test_a_large_body_is_noted_as_a_small_one(tolerant_http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "x", "note": "y" * 100_000}]
    answer = tolerant_http.post("/v1/chat/completions", json={**CHAT, "messages": messages})
    assert "note: unknown field" in answer.json()["warning"]


def test_streams_name_it_at_their_end(tolerant: RunningServer, tolerant_http: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{tolerant.http_url}/v1", api_key="none", max_retries=0) as client:
        chunks = list(client.chat.completions.create(**CHAT, stream=True, extra_body={"zzzz": 1}))
    assert [getattr(chunk, "warning", "") for chunk in chunks][-1] == "zzzz: unknown field, ignored"
    with anthropic.Anthropic(base_url=tolerant.http_url, api_key="none", max_retries=0) as claude:
        stream = claude.messages.create(**MESSAGE, stream=True, extra_body={"zzzz": 1, "speed": "fast"})
        events = [event for event in stream if event.type == "message_delta"]
    assert "zzzz: unknown field, ignored" in str(getattr(events[-1], "warning", ""))
    lines = tolerant_http.post("/api/chat", json={"model": MODEL, "messages": MESSAGES, "zzzz": 1}).text.splitlines()
    assert json.loads(lines[-1])["warning"] == "zzzz: unknown field, ignored"


def test_the_log_has_each_of_them_once(tolerant_http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="llmserve"):
        for _ in range(3):
            tolerant_http.post("/v1/chat/completions", json={**CHAT, "only_once": 1})
    assert [record.getMessage() for record in caplog.records if "only_once" in record.getMessage()] == [
        "a request to the text APIs: only_once: unknown field, ignored"
    ]
