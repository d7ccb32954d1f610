"""Log probs of prompts and the likeliest tokens, as evaluation harnesses ask for them."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from llmserve.engine.fake import fake_log_prob, fake_prompt_log_prob
from llmserve.stages.tokenizer import Tokenizer
from tests.frontends.text.conftest import VOCAB_SIZE, expected_ids
from tests.frontends.text.test_chat import MESSAGES

MODEL = "ensemble"
PROMPTS = ["The small red fox", "fox runs over the hill"]


def log_probs(made: Any, place: int = 0) -> Any:
    found = made.choices[place].logprobs
    assert found is not None
    return found


def test_the_likeliest_tokens_of_a_completion(client: openai.OpenAI) -> None:
    made = client.completions.create(model=MODEL, prompt=PROMPTS[0], max_tokens=5, temperature=0, logprobs=3)
    found = log_probs(made)
    assert len(found.top_logprobs) == 5
    for token, log_prob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert 1 <= len(top) <= 4  # the token itself, too
        assert top[token] == pytest.approx(log_prob, abs=1e-6)


def test_the_likeliest_tokens_of_a_chat(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5, "temperature": 0}
    made = client.chat.completions.create(**asked, logprobs=True, top_logprobs=4)
    content = log_probs(made).content
    assert [len(one.top_logprobs) for one in content] == [4] * 5
    streamed = client.chat.completions.create(**asked, logprobs=True, top_logprobs=4, stream=True)
    assert [
        one for chunk in streamed if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content
    ] == content


@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize("as_ids", [False, True])
def test_a_prompt_is_scored_by_echo(client: openai.OpenAI, tokenizer: Tokenizer, num_top: int, as_ids: bool) -> None:
    """What lm-evaluation-harness asks: a batch of prompts, echoed with log probs, one token more."""
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    asked: Any = {"model": MODEL, "prompt": ids if as_ids else PROMPTS, "temperature": 0, "echo": True}
    made = client.completions.create(**asked, max_tokens=1, logprobs=num_top, seed=1234)
    for place, prompt in enumerate(ids):
        found = log_probs(made, place)
        expected = [
            *(fake_prompt_log_prob(prompt[:end], prompt[end], VOCAB_SIZE) for end in range(1, len(prompt))),
            fake_log_prob(expected_ids(prompt, 1)[0], VOCAB_SIZE),
        ]
        assert found.token_logprobs == [None, *(pytest.approx(one) for one in expected)]
        assert "".join(found.tokens[: len(prompt)]) == PROMPTS[place]
        assert found.text_offset[0] == 0
        if num_top:
            assert found.top_logprobs[0] is None
            assert all(one for one in found.top_logprobs[1:])
    nothing = client.completions.create(**asked, max_tokens=0, logprobs=num_top)
    assert log_probs(nothing).token_logprobs == log_probs(made).token_logprobs[:-1]


def test_offsets_behind_characters_of_several_tokens(client: openai.OpenAI) -> None:
    prompt = "é🎉 a"
    asked: Any = {"model": MODEL, "prompt": prompt, "temperature": 0, "echo": True, "logprobs": 1}
    found = log_probs(client.completions.create(**asked, max_tokens=0))
    *letters, last = [prompt[offset:] for offset in found.text_offset]
    assert letters == ["é🎉 a"] * 2 + ["🎉 a"] * 4  # a token for each byte
    assert last == found.tokens[-1] == " a"
    whole = log_probs(client.completions.create(**asked, max_tokens=5)).text_offset
    chunks = client.completions.create(**asked, max_tokens=5, stream=True)
    scored = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
    assert [offset for one in scored if one is not None for offset in one.text_offset or ()] == whole


def test_a_prompt_of_one_token_has_no_log_probs(client: openai.OpenAI) -> None:
    made = client.completions.create(model=MODEL, prompt=[300], max_tokens=0, echo=True, logprobs=2)
    assert log_probs(made).token_logprobs == [None]


def test_every_answer_has_the_prompt_before_it(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    made = client.completions.create(model=MODEL, prompt=PROMPTS[0], max_tokens=2, echo=True, logprobs=1, n=3)
    size = len(tokenizer.encode(PROMPTS[0]))
    first = log_probs(made).token_logprobs[:size]
    assert [log_probs(made, place).token_logprobs[:size] for place in range(3)] == [first] * 3
