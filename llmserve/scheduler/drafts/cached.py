"""What the cache of a model that drafts holds of a sequence. Blocks are given back behind the window of the next known
token, so a wrong draft needs none of them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from llmserve.scheduler.drafts.pending import PendingRows
from llmserve.scheduler.sequence import Sequence


@dataclass(slots=True, eq=False)
class Cached:
    max_num_cached: int  # tokens
    num_skipped: int = 0  # of the sequence's first tokens
    block_table: array[int] = field(default_factory=lambda: array("i"))
    windowed: tuple[array[int], ...] = ()  # as `Sequence` has them; the next one, too
    num_given_back: int = 0
    num_computed_tokens: int = 0  # known ones
    ahead: array[int] = field(default_factory=lambda: array("i"))  # drafts, computed behind them
    states: tuple[int, int] = (0, 0)  # slots for the state behind known tokens, and for that behind drafts
    hashes: list[bytes] = field(default_factory=list)  # of full blocks of known tokens
    rows: PendingRows | None = None  # where the model reads such

    def num_known(self, sequence: Sequence) -> int:
        """Tokens that could be computed now."""
        num_tokens = sequence.num_tokens - self.num_skipped
        return num_tokens if self.rows is None else min(num_tokens, self.num_computed_tokens + len(self.rows))

    def copied_windowed(self) -> tuple[array[int], ...]:
        return tuple(table[:] for table in self.windowed)
