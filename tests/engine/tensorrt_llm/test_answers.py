"""TensorRT-LLM's tokens as our events: end tokens, stop words, log-probs, times."""

from __future__ import annotations

import time
from dataclasses import replace

from llmserve.core import FinishReason, GenerateRequest, SamplingParams, TokenEvent
from llmserve.engine.tensorrt_llm.answers import Measured, SequenceAnswer, too_late

REQUEST = GenerateRequest("r", (1, 2, 3), SamplingParams(max_tokens=9), end_id=2, return_log_probs=True)


def events(request: GenerateRequest, *steps: tuple[list[int], FinishReason | None]) -> list[TokenEvent]:
    answer = SequenceAnswer(request, 0)
    made = [answer.add(tokens, [-0.5] * len(tokens), reason) for tokens, reason in steps]
    assert answer.is_over
    return [event for event in made if event is not None]


def tokens_of(made: list[TokenEvent]) -> list[int]:
    return [token for event in made for token in event.token_ids]


def test_the_end_token_is_no_part_of_the_answer_whether_it_comes_or_not() -> None:
    for last in ([5, 2], [5]):
        made = events(REQUEST, ([4], None), (last, FinishReason.END_ID))
        assert [event.token_ids for event in made] == [(4,), (5,)]
        assert [event.log_probs for event in made] == [(-0.5,), (-0.5,)]
        assert made[-1].cum_log_prob == -1.0
    assert tokens_of(events(REQUEST, ([4, 2], FinishReason.LENGTH))) == [4, 2]


def test_a_stop_word_is_held_back_and_left_out() -> None:
    request = replace(REQUEST, stop_ids=((7, 8, 9),))
    made = events(request, ([4], None), ([7], None), ([8], None), ([9], FinishReason.STOP_WORDS))
    assert [(event.token_ids, event.finish_reason) for event in made] == [((4,), None), ((), FinishReason.STOP_WORDS)]
    made = events(request, ([4, 7], None), ([8], None), ([5], None), ([6], FinishReason.LENGTH))
    assert [event.token_ids for event in made] == [(4,), (7, 8, 5), (6,)]
    assert tokens_of(events(request, ([7, 8], FinishReason.LENGTH))) == [7, 8]


def test_a_stop_word_that_the_library_does_not_see_ends_the_answer() -> None:
    answer = SequenceAnswer(replace(REQUEST, stop_ids=((7, 8),)), 0)
    event = answer.add([4, 7, 8, 5], [-0.5] * 4, None)
    assert event is not None
    assert (event.token_ids, event.finish_reason) == ((4,), FinishReason.STOP_WORDS)
    assert answer.is_over


def test_no_stop_word_reaches_into_the_first_min_tokens() -> None:
    request = replace(REQUEST, stop_ids=((7,), (8, 9)), sampling=SamplingParams(max_tokens=9, min_tokens=2))
    assert tokens_of(events(request, ([7, 8, 9, 4, 7], None))) == [7, 8, 9, 4]


def test_the_first_and_the_last_event_have_what_is_known() -> None:
    answer = SequenceAnswer(REQUEST, 3)
    first = answer.add([4], [-0.5], None)
    middle = answer.add([5], [-0.5], None)
    time.sleep(0.001)
    last = answer.add([6], [-0.5], FinishReason.LENGTH, Measured(cached_tokens=99, queue_ns=1))
    assert first is not None
    assert middle is not None
    assert last is not None
    assert (first.usage is None, middle.usage is None, last.usage is None) == (False, True, False)
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.cached_tokens, last.usage.completion_tokens) == (3, 3, 3)
    usage = last.usage
    assert usage.arrival_ns < usage.first_scheduled_ns <= usage.first_token_ns < usage.last_token_ns
    assert last.sequence_index == 3


def test_log_probs_only_where_asked_for() -> None:
    (event,) = events(replace(REQUEST, return_log_probs=False), ([4], FinishReason.LENGTH))
    assert (event.log_probs, event.cum_log_prob) == ((), -0.5)


def test_a_request_that_is_too_late() -> None:
    assert too_late(REQUEST) == []
    assert too_late(replace(REQUEST, deadline=time.monotonic() + 9)) == []
    events = too_late(replace(REQUEST, deadline=time.monotonic(), num_sequences=2))
    assert [(event.token_ids, event.finish_reason, event.sequence_index) for event in events] == [
        ((), FinishReason.TIMED_OUT, 0),
        ((), FinishReason.TIMED_OUT, 1),
    ]
    assert all(event.usage for event in events)
