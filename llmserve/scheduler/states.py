"""Who owns which slot for a state: what a network with states keeps of a sequence beside its blocks, of a fixed size.

A running sequence has a slot that its next chunk writes, and one that it reads. They are two where it starts from a
state that was kept, or has just left one behind: a checkpoint, found by the hash of the blocks up to it. Nothing is
copied to make one: the sequence goes on in another slot.

A prefix is found where its blocks and a checkpoint behind them are. So there are checkpoints at the last block of a
prompt that another prompt may share, and every `checkpoint_blocks` blocks. Slots are given away by the rules of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from llmserve.scheduler.blocks import BlockPool
from llmserve.scheduler.sequence import Sequence
from llmserve.scheduler.settings import SchedulerConfig

NO_STATE = -1


class StatePool:
    """Does nothing for a network without states."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._slots = BlockPool(config.num_states)

    @property
    def num_free(self) -> int:
        """Slots that no running sequence has."""
        return self._slots.num_free

    def match(self, hashes: Seq[bytes], pool: BlockPool) -> tuple[list[int], int]:
        """The blocks that hold the longest known beginning of `hashes` with a state behind it, and that state."""
        blocks = pool.match(hashes)
        if not self._config.num_states:
            return blocks, NO_STATE
        for count in range(len(blocks), 0, -1):
            for state in self._slots.match(hashes[count - 1 : count]):
                if self._slots.is_used(state) or self._slots.num_free > 1:  # it needs one of its own, too
                    return blocks[:count], state
        return [], NO_STATE

    def start(self, sequence: Sequence, state: int) -> bool:
        """Give it a slot, and `state`, which `match` found, to start from; False when there is none."""
        if not self._config.num_states:
            return True
        if not self._slots.num_free:
            return False
        if state != NO_STATE:
            self._slots.acquire([state])
        [own] = self._slots.allocate(1)
        sequence.states = (own if state == NO_STATE else state, own)
        return True

    def num_until_checkpoint(self, sequence: Sequence) -> int:
        """Tokens that its next chunk may have, so that a state can be kept behind it."""
        size, done = self._config.block_size, sequence.num_computed_tokens
        if not self._keeps:
            return sequence.num_pending
        interval = size * self._config.checkpoint_blocks
        ends = (done // interval * interval + interval, self._end_of_prompt(sequence))
        return min(end for end in ends if end > done) - done

    def advance(self, sequence: Sequence) -> None:
        """Its chunk has been computed: its state may be left behind for others."""
        if not self._config.num_states:
            return
        before, state = sequence.states
        if before != state:
            self._slots.release([before])
        sequence.states = (state, state)
        size, done = self._config.block_size, sequence.num_computed_tokens
        is_due = done == self._end_of_prompt(sequence) or done % (size * self._config.checkpoint_blocks) == 0
        if self._keeps and is_due and self._slots.num_free:
            hashes = sequence.block_hashes(done // size, size)
            if not self._slots.match(hashes[-1:]):
                self._slots.register(state, hashes[-1], b"", ())
                [following] = self._slots.allocate(1)
                sequence.states = (state, following)

    def release(self, sequence: Sequence) -> None:
        if self._config.num_states:
            self._slots.release(list(set(sequence.states)))

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        self._slots.check_integrity(set(sequence.states) for sequence in running if self._config.num_states)

    @property
    def _keeps(self) -> bool:
        return self._config.num_states > 0 and self._config.settings.reuses_blocks

    def _end_of_prompt(self, sequence: Sequence) -> int:
        """Where the last block ends that another prompt of these tokens may share."""
        return (sequence.num_prompt - 1) // self._config.block_size * self._config.block_size
