"""A sequence's part of a draft model's KV cache. Window blocks are released only before the window of the next known
token, so they remain valid after a wrong draft."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from llmserve.scheduler.drafts.pending import PendingRows
from llmserve.scheduler.sequence import Sequence


@dataclass(slots=True, eq=False)
class Cached:
    max_num_cached: int  # tokens
    num_skipped: int = 0  # first tokens of the sequence that are not in the cache
    block_table: array[int] = field(default_factory=lambda: array("i"))
    windowed: tuple[array[int], ...] = ()  # see `Sequence`, also for the next one
    num_given_back: int = 0
    num_computed_tokens: int = 0  # computed known tokens
    ahead: array[int] = field(default_factory=lambda: array("i"))  # computed drafts after them
    states: tuple[int, int] = (0, 0)  # slots for the state after known tokens, and for the state after drafts
    hashes: list[bytes] = field(default_factory=list)  # of full blocks of known tokens
    rows: PendingRows | None = None  # if the model reads hidden rows

    def num_known(self, sequence: Sequence) -> int:
        """Number of tokens that can be computed now."""
        num_tokens = sequence.num_tokens - self.num_skipped
        return num_tokens if self.rows is None else min(num_tokens, self.num_computed_tokens + len(self.rows))

    def copied_windowed(self) -> tuple[array[int], ...]:
        return tuple(table[:] for table in self.windowed)
