"""What is told of an answer that is computed twice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llmserve.cluster.said import Said
from llmserve.core import FinishReason, PromptScores, TokenEvent, Usage
from llmserve.errors import Unavailable

TOKENS = (11, 12, 13, 14, 15, 16)
LENGTH = FinishReason.LENGTH


def events(sizes: Sequence[int], index: int = 0) -> list[TokenEvent]:
    """An answer of all tokens, so many in each event."""
    made, place = [], 0
    for size in sizes:
        ids = TOKENS[place : place + size]
        place += size
        log_probs = tuple(-float(token) for token in ids)
        made.append(TokenEvent(ids, log_probs, sequence_index=index, finish_reason=LENGTH if place == 6 else None))
    return made


@pytest.mark.parametrize("cut", range(6))
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1, 1), (2, 0, 3, 1), (6,), (4, 2)])
def test_every_token_is_told_once_wherever_the_cut_is(cut: int, sizes: Sequence[int]) -> None:
    """And wherever the second worker's events begin and end."""
    said = Said(1)
    told = [said.news(event) for event in events((1,) * 6)[:cut]]
    assert said.num_tokens == cut
    said.begin_again()
    told += [said.news(event) for event in events(sizes)]
    new = [event for event in told if event is not None]
    assert tuple(token for event in new for token in event.token_ids) == TOKENS
    assert [log_prob for event in new for log_prob in event.log_probs] == [-float(token) for token in TOKENS]
    assert [event.finish_reason for event in new if event.finish_reason] == [LENGTH]
    assert said.is_complete


def test_each_answer_of_a_request_has_its_own_place() -> None:
    said = Said(2)
    for event in (*events((1,) * 6), *events((1,) * 6, 1)[:2]):
        said.news(event)
    said.begin_again()
    again = [said.news(event) for pair in zip(events((1,) * 6), events((1,) * 6, 1), strict=True) for event in pair]
    new = [event for event in again if event is not None]
    assert {event.sequence_index for event in new} == {1}
    assert tuple(token for event in new for token in event.token_ids) == TOKENS[2:]
    assert said.is_complete


@pytest.mark.parametrize(
    "other",
    [
        [TokenEvent((11,)), TokenEvent((99,))],  # another token
        [TokenEvent((11,), finish_reason=FinishReason.END_ID)],  # a shorter answer
        [TokenEvent((11, 12, 13)), TokenEvent((99, 14))],  # one that does not fit within an event
    ],
)
def test_an_answer_that_differs_does_not_go_on(other: list[TokenEvent]) -> None:
    said = Said(1)
    for event in events((1,) * 6)[:4]:
        said.news(event)
    said.begin_again()
    with pytest.raises(Unavailable, match="computes different ones"):
        list(map(said.news, other))


def test_an_answer_that_has_ended_does_not_grow() -> None:
    said = Said(1)
    for event in events((6,)):
        said.news(event)
    said.begin_again()
    with pytest.raises(Unavailable, match="computes different ones"):
        said.news(TokenEvent((*TOKENS, 17)))


def test_scores_of_the_prompt_and_times_are_the_first_ones() -> None:
    said, scores = Said(1), PromptScores((-1.0,))
    first = said.news(TokenEvent((11,), usage=Usage(3, 2, 1, 10, 20, 30, 40), prompt=scores))
    assert first is not None
    assert first.prompt == scores
    said.begin_again()
    last = said.news(TokenEvent(TOKENS, finish_reason=LENGTH, usage=Usage(3, 0, 6, 100, 200, 300, 400), prompt=scores))
    assert last is not None
    assert last.prompt is None
    assert last.usage == Usage(3, 2, 6, 10, 20, 30, 400)
