"""/v1/messages with Anthropic's official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from llmserve.stages.tokenizer import Tokenizer
from tests.frontends.server import RunningServer
from tests.frontends.text.conftest import expected_text
from tests.frontends.text.test_chat import prompt_ids

MODEL = "ensemble"
GREEDY = {"temperature": 0}  # newer clients have no argument for it
MESSAGES: list[Any] = [{"role": "user", "content": "fox"}]


@pytest.fixture(scope="module")
def claude(served: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.http_url, api_key="none", max_retries=0) as made:
        yield made


def test_the_next_message(claude: anthropic.Anthropic, tokenizer: Tokenizer) -> None:
    made = claude.messages.create(model=MODEL, messages=MESSAGES, max_tokens=12, extra_body=GREEDY)
    ids = prompt_ids(tokenizer)
    assert made.content[0].type == "text"
    assert made.content[0].text == expected_text(tokenizer, ids, 12)
    assert (made.role, made.stop_reason, made.stop_sequence) == ("assistant", "max_tokens", None)
    usage = made.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(ids)
    assert usage.output_tokens == 12


def test_system_and_blocks(claude: anthropic.Anthropic, tokenizer: Tokenizer) -> None:
    blocks: Any = [
        {"type": "text", "text": "sm", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "all"},
    ]
    expected = expected_text(tokenizer, prompt_ids(tokenizer, system="small"), 8)
    given: Any
    turn: Any = {"role": "system", "content": "small"}
    made = claude.messages.create(model=MODEL, messages=[turn, *MESSAGES], max_tokens=8, extra_body=GREEDY)
    assert made.content[0].type == "text"
    assert made.content[0].text == expected
    for given in ("small", blocks):
        made = claude.messages.create(model=MODEL, messages=MESSAGES, system=given, max_tokens=8, extra_body=GREEDY)
        assert made.content[0].type == "text"
        assert made.content[0].text == expected


def test_a_stream(claude: anthropic.Anthropic, tokenizer: Tokenizer) -> None:
    with claude.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=12, extra_body=GREEDY) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert final.content[0].type == "text"
    assert final.content[0].text == expected_text(tokenizer, prompt_ids(tokenizer), 12)
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)


def test_stop_sequences(claude: anthropic.Anthropic, tokenizer: Tokenizer) -> None:
    whole = expected_text(tokenizer, prompt_ids(tokenizer), 24)
    stop = whole[6:8]
    made = claude.messages.create(
        model=MODEL, messages=MESSAGES, max_tokens=24, extra_body=GREEDY, stop_sequences=[stop]
    )
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", stop)
    assert made.content[0].type == "text"
    assert made.content[0].text == whole[: whole.index(stop)]


def test_tokens_are_counted(claude: anthropic.Anthropic, tokenizer: Tokenizer) -> None:
    counted = claude.messages.count_tokens(model=MODEL, messages=MESSAGES, system="small")
    assert counted.input_tokens == len(prompt_ids(tokenizer, system="small"))


def test_errors_have_anthropics_shape(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(model="claude", messages=MESSAGES, max_tokens=5)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    tool: Any = {"name": "f", "input_schema": {"type": "object"}}
    with pytest.raises(anthropic.BadRequestError, match="duplicate name 'f'"):
        claude.messages.create(model=MODEL, messages=MESSAGES, max_tokens=5, tools=[tool, tool])
    answer = http.post("/v1/messages", json={"model": MODEL, "messages": [{"role": "system", "content": "x"}]})
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in answer.json()["error"]["message"]
    assert http.get("/v1/messages").json()["type"] == "error"
