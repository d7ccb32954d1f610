"""Streams over a stub core: clients that go away, failures at any time, errors' statuses."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from llmserve.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    LlmserveError,
    ResourceExhausted,
    Unavailable,
    Unsupported,
)
from llmserve.frontends.text.answers.event_stream import Template, data, json_string
from llmserve.frontends.text.answers.failures import anthropic_error, failure_of, ollama_error, openai_error
from tests.frontends.server import RunningServer, wait_until
from tests.frontends.stub_core import StubCore

ASKED: dict[str, Any] = {"model": "ensemble", "temperature": 0, "max_tokens": 1000}
PATHS = ("/v1/completions", "/v1/chat/completions")


def body(path: str, text: str, **more: Any) -> dict[str, Any]:
    prompt = {"prompt": text} if path == PATHS[0] else {"messages": [{"role": "user", "content": text}]}
    return {**ASKED, **prompt, **more}


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_leaves_a_stream_frees_it(server: RunningServer, core: StubCore, path: str) -> None:
    asked = body(path, "forever", stream=True)
    with httpx.Client(base_url=server.http_url) as client, client.stream("POST", path, json=asked) as answer:
        assert answer.status_code == 200, answer.read()
        pieces = answer.iter_raw()  # which closes the answer when it goes
        next(pieces)
        assert core.running == 1
    wait_until(lambda: core.running == 0)


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_does_not_wait_for_an_answer_frees_it(server: RunningServer, core: StubCore, path: str) -> None:
    with httpx.Client(base_url=server.http_url) as client, pytest.raises(httpx.ReadTimeout):
        client.post(path, json=body(path, "forever"), timeout=0.5)
    wait_until(lambda: core.running == 0)


def test_all_prompts_of_a_request_are_freed(server: RunningServer, core: StubCore) -> None:
    asked = {**ASKED, "prompt": ["forever"] * 40, "stream": True}
    with (
        httpx.Client(base_url=server.http_url) as client,
        client.stream("POST", PATHS[0], json=asked) as answer,
    ):
        pieces = answer.iter_raw()
        next(pieces)
        wait_until(lambda: core.running == 32)  # and no more at once
    wait_until(lambda: core.running == 0)


@pytest.mark.parametrize("path", PATHS)
def test_a_failure_in_the_middle_is_the_last_event(server: RunningServer, core: StubCore, path: str) -> None:
    with httpx.Client(base_url=server.http_url) as client:
        answer = client.post(path, json=body(path, "good fail", stream=True))
    assert answer.status_code == 200
    events = [json.loads(event.removeprefix("data: ")) for event in answer.text.split("\n\n") if event]
    assert events[-1]["error"]["message"] == "the model failed"
    assert "[DONE]" not in answer.text
    with openai.OpenAI(base_url=f"{server.http_url}/v1", api_key="x", max_retries=0) as official:
        stream = official.completions.create(prompt="good fail", stream=True, **ASKED)
        with pytest.raises(openai.APIError, match="the model failed"):
            list(stream)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_before_the_first_token_has_its_status(
    server: RunningServer, core: StubCore, path: str, stream: bool
) -> None:
    with httpx.Client(base_url=server.http_url) as client:
        answer = client.post(path, json=body(path, "fail", stream=stream))
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        core.is_ready = False
        answer = client.post(path, json=body(path, "x", stream=stream))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_several_prompts_fail_as_one(server: RunningServer, core: StubCore) -> None:
    with httpx.Client(base_url=server.http_url) as client:
        for stream in (True, False):
            answer = client.post(PATHS[0], json={**ASKED, "prompt": ["fail", "forever"], "stream": stream}, timeout=30)
            assert "the model failed" in answer.text
    wait_until(lambda: core.running == 0)


def test_what_an_ensemble_has_no_input_for_is_refused_by_name(server: RunningServer, core: StubCore) -> None:
    with httpx.Client(base_url=server.http_url) as client:
        answer = client.post(PATHS[0], json=body(PATHS[0], "x", presence_penalty=0.5, logit_bias={"1": 1}))
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "presence_penalty")
        assert "presence_penalty, logit_bias" in error["message"]
        assert client.post(PATHS[0], json=body(PATHS[0], "x", presence_penalty=0)).status_code == 200
    assert len(core.requests) == 1


@pytest.mark.parametrize("texts", [["\ud800"], ["a", "\ud800"]])
def test_half_a_character_breaks_no_stream(texts: list[str]) -> None:
    template = Template(data, {str(i): Template.SLOT for i in range(len(texts))})
    filled = json.loads(template.filled(*map(json_string, texts)).removeprefix(b"data: "))
    assert [*filled.values()] == [*texts[:-1], "?"]


@pytest.mark.parametrize(
    ("error", "status", "openais", "anthropics"),
    [
        (InvalidArgument("x"), 400, "invalid_request_error", "invalid_request_error"),
        (Unsupported("x"), 400, "invalid_request_error", "invalid_request_error"),
        (ResourceExhausted("x"), 429, "rate_limit_error", "rate_limit_error"),
        (Unavailable("x"), 503, "server_error", "overloaded_error"),
        (Cancelled("x"), 503, "server_error", "overloaded_error"),
        (DeadlineExceeded("x"), 504, "server_error", "timeout_error"),
        (InternalError("x"), 500, "server_error", "api_error"),
        (ValueError("x"), 500, "server_error", "api_error"),
    ],
)
def test_errors_in_each_shape(error: LlmserveError, status: int, openais: str, anthropics: str) -> None:
    failure = failure_of(error)
    assert failure.status == status
    assert openai_error(failure)["error"]["type"] == openais
    assert anthropic_error(failure)["error"]["type"] == anthropics
    assert ollama_error(failure) == {"error": failure.message}
    assert ("Retry-After" in failure.headers) == (status in (429, 503))
