"""Finds earlier occurrences of the newest tokens in prompt and answer: first of the last two, then of the last one. The
newest occurrence comes first."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from llmserve.scheduler.drafts.drafter import MAX_DRAFTED

GRAM = 2  # tokens that must match, if there is such an occurrence
INDEXED_AT_ONCE = 1024  # tokens per step
MAX_PLACES = 8  # occurrences compared for a draft
MAX_MATCHED = 12  # tokens compared at an occurrence


class Found(NamedTuple):
    """The continuations after the longest matches."""

    num_matched: int
    followed: Sequence[Sequence[int]]  # the newest place first; none is empty


Find: TypeAlias = "Callable[[array[int]], Found]"
NOTHING = Found(0, ())


def best_places(text: array[int], places: Iterable[int], newest: Sequence[int]) -> tuple[int, list[int]]:
    """The length of the longest match with the newest tokens, and its places. A place is the index after the match."""
    most, best = 0, list[int]()
    for place in places:
        count, longest = 0, min(MAX_MATCHED, place, len(newest))
        while count < longest and text[place - 1 - count] == newest[-1 - count]:
            count += 1
        if count > most:
            most, best = count, [place]
        elif count == most:
            best.append(place)
    return most, best


def chain(newest: int, before: array[int]) -> list[int]:
    """The newest places of a chain, newest first. `before`: for each place, the previous one in its chain, or 0."""
    places = list[int]()
    while newest and len(places) < MAX_PLACES:
        places.append(newest)
        newest = before[newest]
    return places


class OwnText:
    """The text of one sequence. Takes constant time per token. A long prompt is indexed over several steps, so that
    other sequences do not wait."""

    def __init__(self) -> None:
        self._indexes = [_Index(GRAM), _Index(GRAM - 1)]

    @property
    def num_indexed(self) -> int:
        return self._indexes[-1].num_read

    def find(self, token_ids: array[int]) -> Found:
        end = min(len(token_ids), self.num_indexed + INDEXED_AT_ONCE)
        for index in self._indexes:
            index.read(token_ids, end)  # without the place after the newest token
        for index in self._indexes:
            if places := index.places(token_ids):
                most, best = best_places(token_ids, places, token_ids[-MAX_MATCHED:])
                return Found(most, [_repeated(token_ids[place : place + MAX_DRAFTED].tolist()) for place in best])
        return NOTHING


class _Index:
    """Chains of places after the same `gram` tokens."""

    def __init__(self, gram: int) -> None:
        self._gram = gram
        self._newest: dict[bytes, int] = {}
        self._before = array("i", [0] * gram)  # for each place, the previous one in its chain; 0: none

    @property
    def num_read(self) -> int:
        return len(self._before)

    def read(self, token_ids: array[int], end: int) -> None:
        gram, newest, before = self._gram, self._newest, self._before
        for place in range(len(before), end):
            key = token_ids[place - gram : place].tobytes()
            before.append(newest.get(key, 0))
            newest[key] = place

    def places(self, token_ids: array[int]) -> Sequence[int]:
        return chain(self._newest.get(token_ids[-self._gram :].tobytes(), 0), self._before)


def _repeated(token_ids: list[int]) -> list[int]:
    """A continuation that ends early, repeated up to `MAX_DRAFTED` tokens."""
    period = len(token_ids)
    while len(token_ids) < MAX_DRAFTED:
        token_ids.append(token_ids[-period])
    return token_ids
