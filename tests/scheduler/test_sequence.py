"""How an answer ends, what is told when, and what a runner is asked to sample."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from llmserve.core import FinishReason, GenerateRequest, PromptScores, SamplingParams, TokenEvent
from llmserve.scheduler.plan import Chunk, ChunkScores, SampleRequest
from llmserve.scheduler.sequence import Sequence, sequences_for

PARAMS = SamplingParams(max_tokens=6, temperature=0.0)


def sequence(max_seq_len: int = 100, **fields: object) -> Sequence:
    request = GenerateRequest("r", **{"prompt_ids": (8, 9), "sampling": PARAMS, **fields})  # type: ignore[arg-type]
    return sequences_for(request, itertools.count(), max_seq_len=max_seq_len, arrival_ns=5)[0]


def feed(target: Sequence, *tokens: int, log_prob: float = 0.0) -> list[TokenEvent | None]:
    return [target.append(token, log_prob, now_ns) for now_ns, token in enumerate(tokens, 1)]


def told(events: list[TokenEvent | None]) -> list[tuple[int, ...] | None]:
    return [None if event is None else event.token_ids for event in events]


def sample_request(target: Sequence) -> SampleRequest:
    sample = target.chunk(target.num_pending).sample
    assert sample is not None
    return sample


def test_every_token_is_told_at_once_and_the_last_has_the_reason() -> None:
    events = feed(sequence(), 1, 2, 3, 4, 5, 6)
    assert told(events) == [(1,), (2,), (3,), (4,), (5,), (6,)]
    assert [event and event.finish_reason for event in events] == [None] * 5 + [FinishReason.LENGTH]


def test_the_first_and_the_last_event_have_usage() -> None:
    target = sequence(stop_ids=((7, 8),))
    target.num_cached_tokens, target.first_scheduled_ns = 1, 6
    usages = [None if event is None else event.usage for event in feed(target, 7, 1, 2, 3, 4, 5)]
    assert [usage is not None for usage in usages] == [False, True, False, False, False, True]
    first = usages[1]
    assert first is not None
    assert (first.prompt_tokens, first.cached_tokens, first.completion_tokens) == (2, 1, 2)
    assert (first.arrival_ns, first.first_scheduled_ns, first.first_token_ns, first.last_token_ns) == (5, 6, 1, 2)


def test_the_end_token_is_not_told() -> None:
    last = feed(sequence(end_id=2), 1, 2)[-1]
    assert last is not None
    assert (last.token_ids, last.finish_reason) == ((), FinishReason.END_ID)
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (2, 1)


def test_a_stop_word_is_held_back_and_never_told() -> None:
    events = feed(sequence(stop_ids=((1, 2, 3),)), 0, 1, 2, 3)
    assert told(events) == [(0,), None, None, ()]
    assert events[-1] is not None
    assert events[-1].finish_reason is FinishReason.STOP_WORDS


def test_held_tokens_are_told_when_the_stop_word_is_disproved() -> None:
    assert told(feed(sequence(stop_ids=((1, 2, 3),)), 1, 2, 7)) == [None, None, (1, 2, 7)]
    assert told(feed(sequence(stop_ids=((1, 1, 2),)), 1, 1, 1, 0)) == [None, None, (1,), (1, 1, 0)]


@pytest.mark.parametrize(
    ("last", "reason", "answer"),
    [(0, FinishReason.END_ID, (1, 2)), (2, FinishReason.LENGTH, (1, 2, 2))],
)
def test_held_tokens_are_told_when_the_answer_ends_otherwise(
    last: int, reason: FinishReason, answer: tuple[int, ...]
) -> None:
    params = replace(PARAMS, max_tokens=3)
    events = feed(sequence(sampling=params, end_id=0, stop_ids=((1, 2, 2, 2),)), 1, 2, last)
    assert told(events) == [None, None, answer]
    assert events[-1] is not None
    assert events[-1].finish_reason is reason


def test_held_tokens_are_told_when_time_is_over() -> None:
    target = sequence(stop_ids=((1, 2),))
    feed(target, 0, 1)
    event = target.time_out()
    assert (event.token_ids, event.finish_reason) == ((1,), FinishReason.TIMED_OUT)


def test_the_longest_stop_word_wins_and_may_contain_the_end_token() -> None:
    events = feed(sequence(end_id=3, stop_ids=((2, 3), (1, 2, 3))), 1, 2, 3)
    assert told(events) == [None, None, ()]
    assert events[-1] is not None
    assert events[-1].finish_reason is FinishReason.STOP_WORDS


def test_a_stop_word_does_not_begin_in_the_prompt() -> None:
    assert told(feed(sequence(stop_ids=((9, 1),)), 1, 2)) == [(1,), (2,)]


def test_before_min_tokens_nothing_ends_the_answer() -> None:
    params = replace(PARAMS, min_tokens=2)
    target = sequence(sampling=params, end_id=5, stop_ids=((1, 2), (4,)))
    assert sample_request(target).banned == (4, 5)
    assert told(feed(target, 1, 2)) == [(1,), (2,)]
    assert sample_request(target).banned == ()
    assert feed(target, 5)[0].finish_reason is FinishReason.END_ID  # type: ignore[union-attr]


def test_a_stop_word_may_not_reach_into_the_first_min_tokens() -> None:
    target = sequence(sampling=replace(PARAMS, min_tokens=2), stop_ids=((1, 2),))
    assert told(feed(target, 0, 1, 2, 1, 2)) == [(0,), (1,), (2,), None, ()]


def test_the_answer_is_cut_where_max_seq_len_ends() -> None:
    target = sequence(max_seq_len=5)
    assert target.max_tokens == 3
    assert feed(target, 1, 2, 3)[-1].finish_reason is FinishReason.LENGTH  # type: ignore[union-attr]


def test_log_probs_belong_to_the_tokens_that_are_told() -> None:
    target = sequence(return_log_probs=True, stop_ids=((1, 2),))
    events = [target.append(token, -float(token), 1) for token in (3, 1, 5, 1, 2)]
    assert [event and event.log_probs for event in events] == [(-3.0,), None, (-1.0, -5.0), None, ()]
    assert events[2] is not None
    assert events[2].cum_log_prob == -9.0
    assert events[-1] is not None
    assert events[-1].cum_log_prob == -9.0  # the stop word's own are not counted


def test_what_a_preempted_prompt_has_told_is_not_told_again() -> None:
    """Computed again from the beginning, in chunks that may end before what is known already."""
    target = sequence(return_prompt_log_probs=True, prompt_ids=(0, 1, 2, 3, 4, 5))
    for start, tokens in ((0, [0, 1, 2]), (0, [0]), (1, [1, 2, 3, 4, 5])):
        log_probs = [-float(token + 1) for token in tokens if token < 5]
        target.score_prompt(Chunk(0, tokens, start, [0]), ChunkScores(log_probs))
    event = target.append(7, 0.0, 1)
    assert event is not None
    assert event.prompt == PromptScores((-1.0, -2.0, -3.0, -4.0, -5.0))


def test_an_answer_that_times_out_before_its_prompt_is_computed_tells_nothing_of_it() -> None:
    target = sequence(return_prompt_log_probs=True)
    assert target.time_out().prompt is None


def test_no_log_probs_unless_asked_for() -> None:
    assert feed(sequence(), 1, log_prob=-1.0)[0].log_probs == ()  # type: ignore[union-attr]
    assert not sample_request(sequence()).log_prob
    assert sample_request(sequence(return_log_probs=True)).log_prob


def test_usage_has_the_times() -> None:
    target = sequence()
    usage = feed(target, 1, 2, 3, 4, 5, 6)[-1].usage  # type: ignore[union-attr]
    assert usage is not None
    assert (usage.arrival_ns, usage.first_token_ns, usage.last_token_ns) == (5, 1, 6)


def test_bad_words_ban_the_completing_token_also_after_the_prompt() -> None:
    target = sequence(bad_ids=((9, 1), (4,), (1, 2)))
    assert sample_request(target).banned == (1, 4)
    feed(target, 1)
    assert sample_request(target).banned == (2, 4)


def test_history_is_sent_only_with_penalties() -> None:
    target = sequence(sampling=replace(PARAMS, presence_penalty=0.5))
    feed(target, 1)
    sample = sample_request(target)
    assert (tuple(sample.history), sample.num_prompt, sample.position) == ((8, 9, 1), 2, 3)
    plain = sequence()
    feed(plain, 1)
    assert (sample_request(plain).history, sample_request(plain).position) == ((), 3)


def test_a_chunk_is_a_copy_of_the_next_pending_tokens() -> None:
    target = sequence()
    target.block_table.append(3)
    chunk = target.chunk(1)
    assert (list(chunk.token_ids), chunk.start, list(chunk.block_table), chunk.sample) == ([8], 0, [3], None)
    target.num_computed_tokens = 1
    chunk = target.chunk(1)
    assert (list(chunk.token_ids), chunk.start) == ([9], 1)
    assert chunk.sample is not None
    target.block_table.append(4)
    assert list(chunk.block_table) == [3]


def test_n_answers_have_their_own_streams() -> None:
    request = GenerateRequest("r", (1,), num_sequences=3)
    sequences = sequences_for(request, itertools.count(7), max_seq_len=10, arrival_ns=5)
    assert [s.id for s in sequences] == [7, 8, 9]
    assert [sample_request(s).stream for s in sequences] == [0, 1, 2]
    assert [s.leader for s in sequences] == [None, sequences[0], sequences[0]]
