"""Block reservations: blocks that a sequence needs before it starts, and free blocks promised to running sequences."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

from llmserve.scheduler.blocks import BlockPool
from llmserve.scheduler.sequence import Sequence
from llmserve.scheduler.settings import Policy, SchedulerConfig
from llmserve.scheduler.windows import WindowedBlocks


class Reservations:
    """Counts promised blocks. Under `max_utilization`, a running sequence is promised only the blocks of windows."""

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, windows: WindowedBlocks, running: Collection[Sequence]
    ) -> None:
        """`running`: a live view of the running sequences."""
        self._config = config
        self._pool = pool
        self._windows = windows
        self._running = running
        self._reserves_all = config.settings.policy is Policy.GUARANTEED_NO_EVICT

    def num_guaranteed(self, sequence: Sequence) -> int:
        """Number of blocks that must be free before a sequence starts."""
        num_tokens = sequence.max_num_cached if self._reserves_all else sequence.num_tokens
        return self._config.num_blocks_for(num_tokens) + self._windows.num_needed(sequence)

    @property
    def num_unreserved(self) -> int:
        """Number of free blocks that are not promised."""
        return self._pool.num_free - self._windows.num_promised - self._num_promised(self._running)

    def has_room_without(
        self, leaving: Collection[Sequence], staying: Collection[Sequence], newcomer: Sequence
    ) -> bool:
        """Whether `newcomer` could start if the `leaving` sequences were preempted and only `staying` remained."""
        kept = set(chain.from_iterable(map(self._windows.owned, staying)))
        num_freed = len(set(chain.from_iterable(map(self._windows.owned, leaving))) - kept)
        num_reserved = self._windows.num_promised_to(staying) + self._num_promised(staying)
        return self._pool.num_free + num_freed - num_reserved >= self.num_guaranteed(newcomer)

    def _num_promised(self, running: Collection[Sequence]) -> int:
        """Blocks promised for their first tables."""
        if not self._reserves_all:
            return 0
        return sum(self._config.num_blocks_for(s.max_num_cached) - len(s.block_table) for s in running)
