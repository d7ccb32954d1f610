"""/v1/chat/completions with the official client."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from llmserve.engine.fake import fake_log_prob
from llmserve.frontends.shared.text_settings import TextSettings
from llmserve.scheduler import speculation
from llmserve.scheduler.drafts.client import ClientDrafter
from llmserve.stages.tokenizer import Tokenizer
from tests.frontends.text.conftest import VOCAB_SIZE, expected_ids, expected_text, serving

MODEL = "ensemble"
USER, ASSISTANT = 195, 196
MESSAGES: list[Any] = [{"role": "user", "content": "fox"}]


def prompt_ids(tokenizer: Tokenizer, text: str = "fox", system: str = "") -> list[int]:
    return [*tokenizer.encode(system), USER, *tokenizer.encode(text), ASSISTANT]


def test_the_next_message(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    made = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=12, temperature=0)
    ids = prompt_ids(tokenizer)
    assert made.choices[0].message.content == expected_text(tokenizer, ids, 12)
    assert (made.choices[0].message.role, made.choices[0].finish_reason) == ("assistant", "length")
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (len(ids), 12)


def test_system_and_developer_texts_and_parts(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "f"}, {"type": "text", "text": "ox"}]
    expected = expected_text(tokenizer, prompt_ids(tokenizer, system="small"), 8)
    for role in ("system", "developer"):
        messages: Any = [{"role": role, "content": "small"}, {"role": "user", "content": parts}]
        made = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, temperature=0)
        assert made.choices[0].message.content == expected


def test_a_stream_says_the_same(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=12,
            temperature=0,
            stream=True,
            n=2,
            stream_options={"include_usage": True},
        )
    )
    ids = prompt_ids(tokenizer)
    texts = ["", ""]
    for chunk in chunks[2:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [expected_text(tokenizer, ids, 12)] * 2
    assert [chunk.choices[0].delta.role for chunk in chunks[:3]] == ["assistant", "assistant", None]
    assert sorted(c.choices[0].index for c in chunks[:-1] if c.choices[0].finish_reason == "length") == [0, 1]
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), 24)


def test_a_stream_is_server_sent_events(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    documents = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert {document["object"] for document in documents} == {"chat.completion.chunk"}
    assert all("usage" not in document for document in documents)


def test_without_a_limit_there_is_the_engines_and_no_warning(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert made.usage is not None
    assert made.usage.total_tokens == 256
    assert "warning" not in (made.model_extra or {})


def test_log_probs(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=0
    )
    ids = expected_ids(prompt_ids(tokenizer), 6)
    found = made.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert [bytes(one.bytes or ()) for one in found.content] == [tokenizer.token_bytes(token) for token in ids]
    assert [one.logprob for one in found.content] == pytest.approx([fake_log_prob(i, VOCAB_SIZE) for i in ids])
    streamed = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, stream=True
    )
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    assert [one for part in parts if part for one in part.content or ()] == found.content


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "wizard", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": "x", "name": "Ann"}],
        [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
        [],
        "x",
    ],
)
def test_messages_that_cannot_be_given_to_the_model(http: httpx.Client, messages: Any) -> None:
    answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "messages")


def test_template_values_need_a_template(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "no chat template" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("temprature", "temprature: unknown field; did you mean 'temperature'?"),
        ("zzzz", "zzzz: unknown field; remove it"),
        ("t" * 10_000, "unknown field; remove it"),  # too long to be compared with anything
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest_one(http: httpx.Client, field: str, said: str) -> None:
    answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES, field: 1})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


PREDICTIONS = {"text": "fox runs", "parts": [{"type": "text", "text": "fox "}, {"type": "text", "text": "runs"}]}


@pytest.mark.parametrize("content", PREDICTIONS.values(), ids=PREDICTIONS)
def test_what_a_client_predicts_is_drafted(
    client: openai.OpenAI, tokenizer: Tokenizer, content: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted: list[Sequence[int]] = []

    def drafter(draft_ids: Sequence[int], num_prompt: int) -> ClientDrafter:
        drafted.append(draft_ids)
        return ClientDrafter(draft_ids, num_prompt)

    monkeypatch.setattr(speculation, "ClientDrafter", drafter)
    ids = tokenizer.encode("fox runs")
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0}
    asked["logit_bias"] = {str(ids[0]): 100}  # it begins as predicted, and goes on otherwise
    plain = client.chat.completions.create(**asked)
    made = client.chat.completions.create(**asked, prediction={"type": "content", "content": content})
    assert [list(each) for each in drafted] == [ids]
    assert made.choices == plain.choices
    assert made.usage is not None
    assert made.usage.completion_tokens_details is not None
    counts = made.usage.completion_tokens_details
    assert (counts.rejected_prediction_tokens or 0) > 0
    assert counts.accepted_prediction_tokens is not None
    assert "warning" not in (made.model_extra or {})


def test_a_prediction_that_cannot_be_drafted_is_refused_or_left_out(text_dir: Path, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    plain = client.chat.completions.create(**asked)
    too_long: Any = {"type": "content", "content": "fox " * 5000}
    wrong: Any = {"type": "text", "content": "x"}
    with pytest.raises(openai.BadRequestError, match="prediction cannot be used: its text cannot be used as a draft"):
        client.chat.completions.create(**asked, prediction=too_long)
    with pytest.raises(openai.BadRequestError, match="prediction"):
        client.chat.completions.create(**asked, prediction=wrong)
    with (
        serving(text_dir, text=TextSettings()) as served,
        openai.OpenAI(base_url=f"{served.http_url}/v1", api_key="none") as lenient,
    ):
        made = lenient.chat.completions.create(**asked, prediction=too_long)
    assert made.choices == plain.choices
    assert "prediction: its text cannot be used as a draft" in (made.model_extra or {})["warning"]
