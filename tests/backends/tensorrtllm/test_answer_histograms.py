"""What `/metrics` says of answers: how long they took, and how long they are."""

from __future__ import annotations

import time

import pytest

from llmserve.backends.tensorrtllm.answer_histograms import (
    BOUNDS,
    FIRST_TOKEN,
    NEXT_TOKENS,
    OUTPUT,
    PROMPT,
    QUEUE,
    WHOLE,
    AnswerHistograms,
)
from llmserve.core import Usage
from llmserve.engine.fake import fake_engine
from llmserve.metrics import METRICS
from tests.backends.tensorrtllm.models import instance_over, request, responses


def sums(histograms: AnswerHistograms) -> dict[str, tuple[int, float]]:
    """Number of observations and their sum."""
    return {name: (found.cumulative()[-1][1], found.total) for name, found in histograms.by_name.items()}


def test_times_and_tokens_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = 10**18
    monkeypatch.setattr(time, "time_ns", lambda: begin + 2_500_000_000)
    histograms = AnswerHistograms()
    times = (begin, begin + 100_000_000, begin + 500_000_000, begin + 2_300_000_000)
    histograms.record(Usage(30, 0, 10, *times))
    found = sums(histograms)
    expected = {QUEUE: 0.1, FIRST_TOKEN: 0.5, NEXT_TOKENS: 0.2, WHOLE: 2.5, PROMPT: 30, OUTPUT: 10}
    assert {name: count for name, (count, _) in found.items()} == dict.fromkeys(BOUNDS, 1)
    assert {name: total for name, (_, total) in found.items()} == pytest.approx(expected)


def test_what_is_not_known_is_left_out() -> None:
    histograms = AnswerHistograms()
    histograms.record(Usage(30, 0, 0, 0, 0, 0, 0))
    histograms.record(Usage(30, 0, 1, 5, 0, 3, 3))  # one token, and a clock that was set back
    found = sums(histograms)
    assert {name: count for name, (count, _) in found.items()} == {
        PROMPT: 2, OUTPUT: 2, WHOLE: 1, QUEUE: 0, FIRST_TOKEN: 1, NEXT_TOKENS: 0,
    }  # fmt: skip
    assert found[FIRST_TOKEN][1] == 0.0


def test_every_histogram_is_declared() -> None:
    assert all(METRICS[name].kind == "histogram" for name in BOUNDS)


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_answer_is_counted_once(streaming: bool) -> None:
    engine = fake_engine()
    try:
        instance = instance_over(engine)
        await responses(instance, request([1, 2, 3], streaming=streaming, num_return_sequences=2))
        found = sums(instance.histograms)
        assert found[PROMPT] == (2, 6)
        assert found[OUTPUT][0] == 2
        assert all(count == 2 for count, _ in found.values())
    finally:
        engine.close()
