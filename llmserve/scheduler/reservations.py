"""How many blocks a sequence must find free before it starts, and how many free ones belong to those that run."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

from llmserve.scheduler.blocks import BlockPool
from llmserve.scheduler.sequence import Sequence
from llmserve.scheduler.settings import Policy, SchedulerConfig
from llmserve.scheduler.windows import WindowedBlocks


class Reservations:
    """Under `max_utilization` a running sequence has been promised blocks of windows only."""

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, windows: WindowedBlocks, running: Collection[Sequence]
    ) -> None:
        """`running`: at any time, which are."""
        self._config = config
        self._pool = pool
        self._windows = windows
        self._running = running
        self._reserves_all = config.settings.policy is Policy.GUARANTEED_NO_EVICT

    def num_guaranteed(self, sequence: Sequence) -> int:
        """Blocks that must be there before a sequence starts."""
        num_tokens = sequence.max_num_cached if self._reserves_all else sequence.num_tokens
        return self._config.num_blocks_for(num_tokens) + self._windows.num_needed(sequence)

    @property
    def num_unreserved(self) -> int:
        """Free blocks that nobody has been promised."""
        return self._pool.num_free - self._windows.num_promised - self._num_promised(self._running)

    def has_room_without(
        self, leaving: Collection[Sequence], staying: Collection[Sequence], newcomer: Sequence
    ) -> bool:
        """Whether `newcomer` could start if of all running sequences only some stayed."""
        kept = set(chain.from_iterable(map(self._windows.owned, staying)))
        num_freed = len(set(chain.from_iterable(map(self._windows.owned, leaving))) - kept)
        num_reserved = self._windows.num_promised_to(staying) + self._num_promised(staying)
        return self._pool.num_free + num_freed - num_reserved >= self.num_guaranteed(newcomer)

    def _num_promised(self, running: Collection[Sequence]) -> int:
        """To their first tables."""
        if not self._reserves_all:
            return 0
        return sum(self._config.num_blocks_for(s.max_num_cached) - len(s.block_table) for s in running)
