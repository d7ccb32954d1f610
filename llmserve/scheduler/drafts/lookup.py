"""Prompt lookup: what followed the newest tokens the last time that they stood in prompt or answer."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.scheduler.drafts.acceptance import Acceptance
from llmserve.scheduler.drafts.drafter import MAX_DRAFTED, Draftable

GRAM = 3  # tokens that have to be the same before what followed them is drafted
INDEXED_AT_ONCE = 1024  # tokens, in a step


class LookupDrafter(Acceptance):
    """Constant time a token; a long prompt is read over several steps, for others wait for each of them."""

    def __init__(self) -> None:
        super().__init__(num_rejected=1.0)
        self._follows: dict[bytes, int] = {}  # tokens -> place of the one after their last occurrence
        self._num_indexed = GRAM

    def propose(self, sequence: Draftable) -> Sequence[int]:
        token_ids = sequence.token_ids
        follows, end = self._follows, min(len(token_ids), self._num_indexed + INDEXED_AT_ONCE)
        for place in range(self._num_indexed, end):  # the newest ones themselves are not among them
            follows[token_ids[place - GRAM : place].tobytes()] = place
        self._num_indexed = max(self._num_indexed, end)
        place = follows.get(token_ids[-GRAM:].tobytes(), -1)
        return () if place < 0 else _repeated(token_ids[place : place + MAX_DRAFTED].tolist())


def _repeated(token_ids: list[int]) -> list[int]:
    """What ends too early repeats itself."""
    period = len(token_ids)
    while len(token_ids) < MAX_DRAFTED:
        token_ids.append(token_ids[-period])
    return token_ids
