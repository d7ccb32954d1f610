"""What vLLM's users ask beside OpenAI's API: chosen tokens, cut prompts, several conversations, flags of the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from llmserve.engine.fake.runner import fake_logits
from llmserve.frontends.shared.api_keys import ApiKeys
from llmserve.frontends.shared.text_settings import TextSettings
from tests.frontends.server import RunningServer
from tests.frontends.text.conftest import VOCAB_SIZE, serving

MODEL = "ensemble"
MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 6}
CHAT, COMPLETIONS, SEVERAL = "/v1/chat/completions", "/v1/completions", "/v1/chat/completions/batch"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {**GREEDY, "messages": MESSAGES, "logprobs": True},
    COMPLETIONS: {**GREEDY, "prompt": "Hello", "logprobs": 5},
}
KEYS = {"few": "few-0123456789abcdef"}


@pytest.fixture(scope="module")
def flagged(text_dir: Path) -> Iterator[RunningServer]:
    """As an operator of vLLM's starts one."""
    settings = TextSettings(
        forces_usage=True, names_tokens_by_id=True, tells_metrics=True, sampling={"temperature": 0.5, "seed": 7}
    )
    with serving(text_dir, text=settings) as running:
        yield running


def asked(http: httpx.Client, path: str, **fields: Any) -> Any:
    answer = http.post(path, json={**BODIES.get(path, GREEDY), **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(http: httpx.Client, path: str, **fields: Any) -> str:
    answer = http.post(path, json={**BODIES.get(path, GREEDY), **fields})
    assert answer.status_code == 400, answer.text
    text: str = answer.json()["error"]["message"]
    return text


def test_no_beams_are_searched(http: httpx.Client) -> None:
    assert "beam search" in refusal(http, CHAT, use_beam_search=True)
    assert asked(http, CHAT, use_beam_search=False)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_only_allowed_tokens_are_drawn(http: httpx.Client, path: str) -> None:
    allowed = [40, 41, 300]
    for more in ({}, {"temperature": 1.5, "seed": 3}):
        (choice,) = asked(http, path, allowed_token_ids=allowed, return_token_ids=True, **more)["choices"]
        assert len(choice["token_ids"]) == GREEDY["max_tokens"]
        assert {*choice["token_ids"]} <= {*allowed}
    assert f"0 to {VOCAB_SIZE - 1}" in refusal(http, path, allowed_token_ids=[VOCAB_SIZE])
    assert "give only one" in refusal(http, path, allowed_token_ids=[5], response_format={"type": "json_object"})


def test_the_end_is_drawn_if_it_is_allowed(http: httpx.Client) -> None:
    choice = asked(http, COMPLETIONS, allowed_token_ids=[2])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_log_probs_of_chosen_tokens(http: httpx.Client, path: str) -> None:
    """They are those of the model's logits; the token's own is the engine's."""
    chosen = [0, 5, 300, 619]
    fields: Any = {"logprob_token_ids": chosen, "return_tokens_as_token_ids": True, "return_token_ids": True}
    answer = asked(http, path, **fields)
    (choice,) = answer["choices"]
    ids = [*(answer["prompt_token_ids"] if path == CHAT else choice["prompt_token_ids"])]
    for own, (token, log_prob, top) in zip(choice["token_ids"], told(choice["logprobs"]), strict=True):
        logits = fake_logits(ids, 1, VOCAB_SIZE)[0].astype(float)
        scores = logits - np.log(np.exp(logits).sum())
        expected = {f"token_id:{each}": scores[each] for each in chosen} | {f"token_id:{own}": log_prob}
        assert next(iter(top)) == token == f"token_id:{own}"
        assert top == pytest.approx(expected, abs=1e-5)
        ids.append(own)
    assert "require logprobs" in refusal(http, path, logprob_token_ids=[5], logprobs=None)
    assert "0 to 619" in refusal(http, path, logprob_token_ids=[VOCAB_SIZE])


def told(log_probs: Any) -> Iterator[tuple[str, float, dict[str, float]]]:
    """The tokens of both APIs."""
    if "content" in log_probs:
        for one in log_probs["content"]:
            yield one["token"], one["logprob"], {each["token"]: each["logprob"] for each in one["top_logprobs"]}
    else:
        yield from zip(log_probs["tokens"], log_probs["token_logprobs"], log_probs["top_logprobs"], strict=True)


def test_streams_have_them_too(client: openai.OpenAI, http: httpx.Client) -> None:
    more = {"logprob_token_ids": [7, 400], "allowed_token_ids": [9], "return_tokens_as_token_ids": True}
    fields: Any = {**GREEDY, "max_tokens": 1, "stream": True, "extra_body": more}
    chunks = [*client.chat.completions.create(**fields, messages=MESSAGES, logprobs=True)]
    found = [one for each in chunks if (probs := each.choices[0].logprobs) for one in probs.content or ()]
    assert [[top.token for top in one.top_logprobs] for one in found] == [["token_id:9", "token_id:7", "token_id:400"]]
    parts = [*client.completions.create(**fields, prompt="Hello", logprobs=1)]
    tops = [top for part in parts if (probs := part.choices[0].logprobs) for top in probs.top_logprobs or ()]
    assert [[*top] for top in tops] == [["token_id:9", "token_id:7", "token_id:400"]]


def test_no_alternatives_are_the_token_alone(http: httpx.Client) -> None:
    found = asked(http, COMPLETIONS, logprobs=0)["choices"][0]["logprobs"]
    expected = [{token: value} for token, value in zip(found["tokens"], found["token_logprobs"], strict=True)]
    assert found["top_logprobs"] == expected


def test_a_prompt_is_cut(http: httpx.Client) -> None:
    ids = [*range(40, 48)]
    fields: Any = {"prompt": ids, "return_token_ids": True, "truncate_prompt_tokens": 3}
    for side, expected in ((None, ids[-3:]), ("left", ids[-3:]), ("right", ids[:3])):
        choice = asked(http, COMPLETIONS, **fields, truncation_side=side)["choices"][0]
        assert choice["prompt_token_ids"] == expected
        assert choice["text"] == asked(http, COMPLETIONS, prompt=expected)["choices"][0]["text"]
    whole = asked(http, CHAT, return_token_ids=True)["prompt_token_ids"]
    assert asked(http, CHAT, return_token_ids=True, truncate_prompt_tokens=2)["prompt_token_ids"] == whole[-2:]
    assert "echo" in refusal(http, COMPLETIONS, **fields, echo=True)


def test_a_router_sends_the_ids_that_it_has_made(http: httpx.Client) -> None:
    first = asked(http, CHAT, return_token_ids=True)
    other: Any = {"messages": [{"role": "user", "content": "Else"}], "return_token_ids": True}
    again = asked(http, CHAT, **other, kv_transfer_params={"prompt_token_ids": first["prompt_token_ids"]})
    assert again["prompt_token_ids"] == first["prompt_token_ids"]
    assert again["choices"] == first["choices"]


def test_several_conversations(http: httpx.Client, text_dir: Path, tmp_path: Path) -> None:
    talks = [MESSAGES, [{"role": "user", "content": "Bye"}, {"role": "assistant", "content": "So"}]]
    drawn = {**GREEDY, "n": 2, "temperature": 1, "seed": 4}
    fields: Any = {**drawn, "logprobs": True, "return_token_ids": True, "echo": True}
    found = asked(http, SEVERAL, messages=talks, **fields)
    alone = [asked(http, CHAT, messages=talk, **fields) for talk in talks]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    expected = [{**choice, "prompt_token_ids": one["prompt_token_ids"]} for one in alone for choice in one["choices"]]
    assert [{**choice, "index": choice["index"] % 2} for choice in found["choices"]] == [
        {**choice, "prompt_logprobs": None} for choice in expected
    ]
    assert found["usage"]["total_tokens"] == sum(one["usage"]["total_tokens"] for one in alone)
    assert "cannot be streamed" in refusal(http, SEVERAL, messages=talks, stream=True)
    assert "messages.1.0: 'role'" in refusal(http, SEVERAL, messages=[MESSAGES, [{"role": "x", "content": "y"}]])
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys: [{{name: few, key: {KEYS['few']}, max_answers: 1}}]")
    with serving(text_dir, ApiKeys(file)) as limited, httpx.Client(base_url=limited.http_url) as few:
        answer = few.post(
            SEVERAL, json={**GREEDY, "messages": [MESSAGES] * 4}, headers={"authorization": f"Bearer {KEYS['few']}"}
        )
    assert len(answer.json()["choices"]) == 4  # one after another


def test_sagemakers_path(http: httpx.Client) -> None:
    for path in (CHAT, COMPLETIONS):
        assert http.post("/invocations", json=BODIES[path]).json()["choices"] == asked(http, path)["choices"]
    assert "/v1/chat/completions" in http.post("/invocations", json={"input": "x"}).json()["error"]["message"]
    assert refusal(http, "/invocations", messages=[], top_p=4).count("top_p") == 1
    for body, field in (({}, "messages"), ({"prompt": 4}, "prompt")):
        assert http.post("/invocations", json=body).json()["error"]["param"] == field


def test_flags_for_every_request(flagged: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{flagged.http_url}/v1", api_key="none", max_retries=0) as client:
        fields: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "logprobs": True, "top_logprobs": 1}
        chunks = [*client.chat.completions.create(**fields, stream=True)]
        counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
        assert len(counts) == len(chunks)
        assert counts == sorted(counts)
        whole = [client.chat.completions.create(**fields) for _ in range(2)]
    assert whole[0].choices == whole[1].choices  # one seed
    probs = whole[0].choices[0].logprobs
    assert probs is not None
    assert all(one.token.startswith("token_id:") for one in probs.content or ())
    for made in (whole[0], chunks[-1]):
        metrics: Any = made.model_extra and made.model_extra["metrics"]
        names = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}
        assert {*metrics} == names
        assert all(value >= 0 for value in metrics.values())
