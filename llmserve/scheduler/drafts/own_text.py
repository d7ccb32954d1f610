"""What followed the newest tokens earlier in prompt or answer: first places behind the same three tokens, then behind
the same two, the newest first."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from llmserve.scheduler.drafts.drafter import MAX_DRAFTED

GRAM = 3  # tokens that have to be the same, if such a place exists
INDEXED_AT_ONCE = 1024  # tokens, in a step
MAX_PLACES = 8  # that are looked at for a draft
MAX_MATCHED = 12  # tokens: whether more are the same is not looked at


class Found(NamedTuple):
    """What followed at the places where the most tokens before are the same."""

    num_matched: int
    followed: Sequence[Sequence[int]]  # the newest place first; none is empty


Find: TypeAlias = "Callable[[array[int]], Found]"
NOTHING = Found(0, ())


def best_places(text: array[int], places: Iterable[int], newest: Sequence[int]) -> tuple[int, list[int]]:
    """Those behind the most of the newest tokens, and how many these are. A place follows the tokens before it."""
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
    """Places, the newest first. `before` each: the one before it in its chain, or 0."""
    places = list[int]()
    while newest and len(places) < MAX_PLACES:
        places.append(newest)
        newest = before[newest]
    return places


class OwnText:
    """Of one sequence. Constant time a token; a long prompt is read over several steps, for others wait for each."""

    def __init__(self) -> None:
        self._indexes = [_Index(GRAM), _Index(GRAM - 1)]

    @property
    def num_indexed(self) -> int:
        return self._indexes[-1].num_read

    def find(self, token_ids: array[int]) -> Found:
        end = min(len(token_ids), self.num_indexed + INDEXED_AT_ONCE)
        for index in self._indexes:
            index.read(token_ids, end)  # the place behind the newest token is not among them
        for index in self._indexes:
            if places := index.places(token_ids):
                most, best = best_places(token_ids, places, token_ids[-MAX_MATCHED:])
                return Found(most, [_repeated(token_ids[place : place + MAX_DRAFTED].tolist()) for place in best])
        return NOTHING


class _Index:
    """Places behind the same `gram` tokens, in chains."""

    def __init__(self, gram: int) -> None:
        self._gram = gram
        self._newest: dict[bytes, int] = {}
        self._before = array("i", [0] * gram)  # of each place: the one before it in its chain; 0: none

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
    """What ends too early repeats itself."""
    period = len(token_ids)
    while len(token_ids) < MAX_DRAFTED:
        token_ids.append(token_ids[-period])
    return token_ids
