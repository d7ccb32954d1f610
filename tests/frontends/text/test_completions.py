"""/v1/completions with the official client."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import openai
import pytest

from llmserve.engine.fake import fake_log_prob
from llmserve.scheduler.speculation import Speculator
from llmserve.stages.tokenizer import Tokenizer
from tests.frontends.server import RunningServer
from tests.frontends.text.conftest import VOCAB_SIZE, expected_ids, expected_text, serving

MODEL = "ensemble"
PROMPT = "The small red fox"


def test_a_text_goes_on(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    made = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0)
    ids = tokenizer.encode(PROMPT)
    assert [choice.text for choice in made.choices] == [expected_text(tokenizer, ids, 24)]
    assert made.choices[0].finish_reason == "length"
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (
        len(ids), 24, len(ids) + 24,
    )  # fmt: skip


def test_it_has_sixteen_tokens_by_default(client: openai.OpenAI) -> None:
    made = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0)
    assert made.usage is not None
    assert made.usage.completion_tokens == 16


def test_prompts_are_texts_ids_or_several(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    texts = [PROMPT, "fox", "The fox runs over the hill"]
    ids = [tokenizer.encode(text) for text in texts]
    expected = [expected_text(tokenizer, one, 8) for one in ids]
    for prompt in (texts, ids):
        made = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0)
        assert [choice.text for choice in made.choices] == expected
        assert [choice.index for choice in made.choices] == [0, 1, 2]
        assert made.usage is not None
        assert made.usage.prompt_tokens == sum(map(len, ids))
        assert made.usage.completion_tokens == 24
    made = client.completions.create(model=MODEL, prompt=ids[0], max_tokens=8, temperature=0)
    assert made.choices[0].text == expected[0]


def test_streams_say_the_same(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    prompts = [PROMPT, "fox", "hill"]
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt=prompts,
            max_tokens=8,
            temperature=0,
            stream=True,
            n=2,
            stream_options={"include_usage": True},
        )
    )
    texts, reasons = dict.fromkeys(range(6), ""), dict[int, str]()
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    one = [expected_text(tokenizer, tokenizer.encode(prompt), 8) for prompt in prompts]
    assert list(texts.values()) == [text for text in one for _ in range(2)]
    assert reasons == dict.fromkeys(range(6), "length")
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens == sum(len(tokenizer.encode(prompt)) for prompt in prompts)
    assert usage.completion_tokens == 48
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_without_options_counts_nothing(client: openai.OpenAI) -> None:
    chunks = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3, stream=True)
    assert [chunk.usage for chunk in chunks][-1] is None


def test_seeds_repeat_a_draw_and_none_does_not(client: openai.OpenAI) -> None:
    def text(seed: int | None) -> str:
        made = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20, seed=seed, temperature=1.3)
        return made.choices[0].text

    assert text(7) == text(7) != text(8)
    assert text(-2) == text(-2)
    for none in (None, -1):
        assert len({text(none) for _ in range(4)}) > 1  # two seeds of 620 may mean the same to the fake engine


def test_temperature_of_one_is_the_default_and_draws(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    greedy = expected_text(tokenizer, tokenizer.encode(PROMPT), 20)
    drawn = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20, seed=5)
    assert drawn.choices[0].text != greedy
    first = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20, seed=5, extra_body={"top_k": 1})
    assert first.choices[0].text == greedy


def test_stop_strings_end_an_answer(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    whole = expected_text(tokenizer, tokenizer.encode(PROMPT), 24)
    stop = whole[10:13]
    made = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, stop=[stop])
    assert (made.choices[0].text, made.choices[0].finish_reason) == (whole[: whole.index(stop)], "stop")


def test_a_bias_by_id_decides(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    with pytest.raises(openai.BadRequestError, match="vocabulary has the ids 0 to 619"):
        client.completions.create(model=MODEL, prompt=PROMPT, logit_bias={"620": 1})
    client.completions.create(model=MODEL, prompt=PROMPT, logit_bias={"300": 100}, max_tokens=3)


def test_log_probs_of_an_answer(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    made = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=0)
    ids = expected_ids(tokenizer.encode(PROMPT), 6)
    found = made.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs == pytest.approx([fake_log_prob(token, VOCAB_SIZE) for token in ids])
    assert found.tokens is not None
    assert len(found.tokens) == len(found.text_offset or ()) == 6
    assert found.top_logprobs == [{t: p} for t, p in zip(found.tokens or (), found.token_logprobs or (), strict=True)]


def test_log_probs_of_a_stream_are_those_of_the_whole(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=0)
    parts = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=0, stream=True)
    tokens: list[str] = []
    log_probs: list[float | None] = []
    for chunk in parts:
        found = chunk.choices[0].logprobs
        assert found is not None
        tokens += found.tokens or []
        log_probs += found.token_logprobs or []
    expected = whole.choices[0].logprobs
    assert expected is not None
    assert (tokens, log_probs) == (expected.tokens, expected.token_logprobs)


def test_the_best_of_several(client: openai.OpenAI) -> None:
    drawn = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, seed=3, n=4, logprobs=0)
    best = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, seed=3, n=1, best_of=4)

    def mean(place: int) -> float:
        log_probs = drawn.choices[place].logprobs
        assert log_probs is not None
        return sum(filter(None, log_probs.token_logprobs or ())) / 4

    assert best.choices[0].text == drawn.choices[max(range(4), key=mean)].text
    assert best.usage is not None
    assert best.usage.completion_tokens == 16  # what was drawn is what it took


def test_an_echo_has_the_prompt_before_the_answer(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    answer = expected_text(tokenizer, tokenizer.encode(PROMPT), 6)
    for prompt in (PROMPT, tokenizer.encode(PROMPT)):
        made = client.completions.create(model=MODEL, prompt=prompt, max_tokens=6, temperature=0, echo=True)
        assert made.choices[0].text == PROMPT + answer
    made = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=0, echo=True)
    assert (made.choices[0].text, made.choices[0].finish_reason) == (PROMPT, "length")
    assert made.usage is not None
    assert made.usage.completion_tokens == 0


def test_cached_tokens_are_shown(client: openai.OpenAI) -> None:
    prompt = "The fox runs over the hill and over the hill again"
    client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
    made = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
    assert made.usage is not None
    assert made.usage.prompt_tokens_details is not None
    assert (made.usage.prompt_tokens_details.cached_tokens or 0) > 0


@pytest.mark.parametrize("speculation", [None, False])
def test_drafted_tokens_are_counted_unless_the_request_has_none(
    text_dir: Path, tokenizer: Tokenizer, speculation: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of its own, that does not measure: how far it drafts would depend on what else the machine does."""
    monkeypatch.setattr(Speculator, "observe", lambda speculator, plan, seconds: None)
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    asked |= {"logit_bias": {"7": 100}, "extra_body": {"speculation": speculation}}
    with serving(text_dir) as served, openai.OpenAI(base_url=f"{served.http_url}/v1", api_key="none") as client:
        made = client.completions.create(**asked)
        *_, last = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert made.choices[0].text == tokenizer.decode([7] * 40)
    for usage in (made.usage, last.usage):
        assert usage is not None
        details = usage.completion_tokens_details
        if speculation is False:
            assert details is None
        else:
            assert details is not None
            assert (details.accepted_prediction_tokens or 0) > 0
            assert details.rejected_prediction_tokens is not None


def test_an_answer_that_is_cut_by_the_engine_says_so(client: openai.OpenAI) -> None:
    made = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1000, extra_body={"ignore_eos": True})
    assert "max_tokens is 1000" in made.model_extra["warning"]  # type: ignore[index]
    unlimited = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=None, extra_body={"ignore_eos": True, "temperature": 0}
    )
    assert unlimited.choices[0].finish_reason == "length"
    assert "warning" not in (unlimited.model_extra or {})


def test_many_log_probs_are_made_beside_the_loop(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "logprobs": 0, "extra_body": {"ignore_eos": True}}
    one = client.completions.create(**asked, max_tokens=100)
    many = client.completions.create(**asked, max_tokens=100, n=64)
    assert [choice.logprobs for choice in many.choices] == [one.choices[0].logprobs] * 64


def test_the_metrics_page_counts_answers(served: RunningServer, client: openai.OpenAI) -> None:
    def num_answers() -> float:
        family = 'llmserve_time_to_first_token_seconds_count{model="tensorrt_llm",version="1"}'
        found = re.search(rf"^{family} (.+)$", served.core.metrics_text(), re.MULTILINE)
        return float(found[1]) if found else -1.0

    before = num_answers()
    client.completions.create(model="ensemble", prompt="hello", max_tokens=2)
    assert num_answers() == before + 1 >= 1
    page = served.core.metrics_text()
    assert 'llmserve_request_generation_tokens_bucket{model="tensorrt_llm",version="1",le="+Inf"}' in page
    assert "# TYPE llmserve_request_generation_tokens histogram" in page


@pytest.mark.parametrize("prompt", ["fox", [200, 201, 202]])
@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"logprobs": 0, "n": 2}, {"logprobs": 1, "max_tokens": 0}])
def test_a_streamed_echo_is_the_one_that_is_not(client: openai.OpenAI, prompt: Any, more: dict[str, Any]) -> None:
    asked: Any = {"model": MODEL, "prompt": prompt, "max_tokens": 5, "temperature": 0, "echo": True, **more}
    asked |= {"extra_body": {"speculation": False}}  # the second answer may draft from the first, and count it
    whole = client.completions.create(**asked)
    chunks = [*client.completions.create(**asked, stream=True, stream_options={"include_usage": True})]
    assert chunks[-1].usage == whole.usage
    for index, choice in enumerate(whole.choices):
        parts = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert "".join(part.text for part in parts) == choice.text
        assert parts[-1].finish_reason == choice.finish_reason
        if choice.logprobs is not None:
            scores = [part.logprobs for part in parts if part.logprobs is not None]
            for name in ("tokens", "token_logprobs", "text_offset"):
                assert [one for each in scores for one in getattr(each, name) or ()] == getattr(choice.logprobs, name)
