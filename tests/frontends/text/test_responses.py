"""/v1/responses with the official client."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from llmserve.stages.tokenizer import Tokenizer
from tests.frontends.text.conftest import expected_text
from tests.frontends.text.test_chat import prompt_ids

MODEL = "ensemble"


def test_the_answer_to_a_text(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    made = client.responses.create(model=MODEL, input="fox", max_output_tokens=12, temperature=0)
    ids = prompt_ids(tokenizer)
    assert made.output_text == expected_text(tokenizer, ids, 12)
    assert (made.status, made.incomplete_details and made.incomplete_details.reason) == (
        "incomplete", "max_output_tokens",
    )  # fmt: skip
    assert made.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens) == (len(ids), 12)


def test_instructions_and_conversations(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    expected = expected_text(tokenizer, prompt_ids(tokenizer, system="small"), 8)
    asked: Any = [{"role": "user", "content": [{"type": "input_text", "text": "fox"}]}]
    made = client.responses.create(
        model=MODEL, input=asked, instructions="small", max_output_tokens=8, temperature=0, store=False
    )
    assert made.output_text == expected
    again: Any = [{"role": "user", "content": "fox"}, *made.output, {"role": "user", "content": "red"}]
    more = client.responses.create(model=MODEL, input=again, max_output_tokens=4)
    assert more.output_text is not None


def test_a_stream_of_typed_events(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    with client.responses.stream(model=MODEL, input="fox", max_output_tokens=12, temperature=0) as stream:
        events = list(stream)
    assert events[-1].type == "response.incomplete"
    final = events[-1].response
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.output_text == expected_text(tokenizer, prompt_ids(tokenizer), 12)
    assert final.usage is not None
    assert final.usage.output_tokens == 12


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"background": True, "store": False}, "background"),
        ({"input": [{"type": "reasoning", "id": "x", "summary": []}]}, "input"),
        ({"input": []}, "input"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_what_is_refused(http: httpx.Client, more: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/responses", json={"model": MODEL, "input": "x", **more})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("item", [{"type": "item_reference", "id": "x"}, "x"])
def test_an_item_of_no_known_type_is_refused_in_plain_words(http: httpx.Client, item: Any) -> None:
    answer = http.post("/v1/responses", json={"model": MODEL, "input": [item]})
    assert answer.status_code == 400
    assert "input.0: must be an object whose 'type' is 'message', " in answer.json()["error"]["message"]


@pytest.mark.parametrize("wanted", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}])
def test_log_probs_of_a_response(client: openai.OpenAI, wanted: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": "ensemble", "input": "Hello", "max_output_tokens": 16, "temperature": 0, **wanted}
    response = client.responses.create(**asked)
    (part,) = response.output[0].content
    found = part.logprobs
    assert found
    assert len(found) == response.usage.output_tokens
    assert {len(one.top_logprobs) for one in found} == {wanted.get("top_logprobs", 0)}
    assert all(one.logprob <= 0 for one in found)
    events = [*client.responses.create(**asked, stream=True)]
    deltas = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert [one.token for one in deltas] == [one.token for one in found]
    done = next(event for event in events if event.type == "response.output_text.done")
    assert [one.logprob for one in done.logprobs] == [one.logprob for one in found]
