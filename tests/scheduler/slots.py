"""A guide that says which tokens may stand at each place of an answer. One that has no other beside it is forced."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from llmserve.core import GuideState


@dataclass(frozen=True)
class Slot:
    allowed: frozenset[int]  # none: the answer is stuck here
    may_end: bool = False


@dataclass(frozen=True)
class Slots:
    """Nothing may follow the last one."""

    slots: tuple[Slot, ...]

    def start(self) -> SlotMatcher:
        return SlotMatcher(self)

    def state(self, num_taken: int) -> GuideState:
        if num_taken >= len(self.slots):
            return GuideState.COMPLETE
        slot = self.slots[num_taken]
        return GuideState.OPEN if slot.allowed or slot.may_end else GuideState.STUCK

    def allowed(self, num_taken: int, end_ids: Sequence[int]) -> set[int]:
        """After so many tokens."""
        slot = self.slots[num_taken] if num_taken < len(self.slots) else Slot(frozenset(), may_end=True)
        return set(slot.allowed) | (set(end_ids) if slot.may_end else set())


class SlotMatcher:
    def __init__(self, guide: Slots, num_taken: int = 0) -> None:
        self._guide = guide
        self._num_taken = num_taken
        self.state = GuideState.OPEN

    def mask(self, end_ids: Sequence[int]) -> bytes:
        self.state = self._guide.state(self._num_taken)
        return sum(1 << token for token in self._guide.allowed(self._num_taken, end_ids)).to_bytes(4, "little")

    def advance(self, token: int) -> None:
        self._num_taken += 1

    def is_complete(self) -> bool:
        return self._guide.state(self._num_taken) is GuideState.COMPLETE

    def fork(self) -> SlotMatcher:
        return SlotMatcher(self._guide, self._num_taken)

    def likely(self) -> Sequence[int]:
        left = self._guide.slots[self._num_taken :]
        single = itertools.takewhile(lambda slot: len(slot.allowed) == 1 and not slot.may_end, left)
        return [token for slot in single for token in slot.allowed]

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        pairs = zip(token_ids, self._guide.slots[self._num_taken :], strict=False)
        return len(list(itertools.takewhile(lambda pair: pair[0] in pair[1].allowed, pairs)))
