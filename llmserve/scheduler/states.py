"""Who owns which slot for a state: what a network with states keeps of a sequence beside its blocks, of a fixed size.

A running sequence has a slot that its next chunk writes, and one that it reads. They are two where it starts from a
state that was kept, or has just left one behind: a checkpoint, found by the hash of the blocks up to it. Nothing is
copied to make one: the sequence goes on in another slot. One is also kept before the end of a chunk, in a third slot:
few prompts need a step more.

A prefix is found where its blocks and a checkpoint behind them are. So there are checkpoints

* at the last block of a prompt that another prompt may share,
* where a prompt leaves the beginning that it shares with earlier ones, as behind a system prompt,
* every `checkpoint_blocks` blocks.

A chunk with drafts writes its last state into a slot more, and the state before the drafts into its sequence's own. If
all drafts are drawn, the sequence goes on in the first; else it goes back to the second, and computes those that were
drawn again. So each step computes at least one token for good.

Slots are given away by the rules of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from llmserve.scheduler.blocks import BlockPool
from llmserve.scheduler.drafts.drafter import MAX_DRAFTED
from llmserve.scheduler.sequence import Sequence
from llmserve.scheduler.settings import SchedulerConfig
from llmserve.scheduler.windows import WindowedBlocks

NO_STATE = -1


class StatePool:
    """Does nothing for a network without states."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.slots = BlockPool(config.num_states)

    @property
    def num_free(self) -> int:
        """Slots that no running sequence has."""
        return self.slots.num_free

    def match(self, sequence: Sequence, hashes: Seq[bytes], windows: WindowedBlocks) -> tuple[list[int], int]:
        """The blocks that hold the longest known beginning of `hashes` with a state behind it, and that state."""
        blocks = windows.pool.match(hashes)
        count = windows.longest(hashes[: len(blocks)])
        if not self._config.num_states:
            return blocks[:count], NO_STATE
        sequence.num_in_known_blocks = len(blocks) * self._config.block_size
        while count:
            for state in self.slots.match(hashes[count - 1 : count]):
                if self.slots.is_used(state) or self.slots.num_free > 1:  # it needs one of its own, too
                    return blocks[:count], state
            count = windows.longest(hashes[: count - 1])
        return [], NO_STATE

    def start(self, sequence: Sequence, state: int) -> bool:
        """Give it a slot, and `state`, which `match` found, to start from; False when there is none."""
        if not self._config.num_states:
            return True
        if not self.slots.num_free:
            return False
        if state != NO_STATE:
            self.slots.acquire([state])
        [own] = self.slots.allocate(1)
        sequence.states = (own if state == NO_STATE else state, own)
        return True

    def most_tokens(self, sequence: Sequence) -> int:
        """That its next chunk may have: one state is kept before its end, and one behind it."""
        if not self._keeps:
            return sequence.num_pending
        return self._due(sequence, self._due(sequence, sequence.num_computed_tokens)) - sequence.num_computed_tokens

    def prepare(self, sequence: Sequence, num_tokens: int) -> None:
        """Its next chunk has so many tokens, and perhaps a state is to be kept before its end."""
        done = sequence.num_computed_tokens
        if not (self._keeps and self.slots.num_free and (due := self._due(sequence, done)) < done + num_tokens):
            return
        if not self.slots.match([self._hash(sequence, due)]):
            [state] = self.slots.allocate(1)
            sequence.kept_state = (state, due - done)

    def advance(self, sequence: Sequence, start: int) -> None:
        """Its chunk from `start` on has been computed: states may be left behind for others."""
        if not self._config.num_states:
            return
        state, num_tokens = sequence.kept_state
        if num_tokens:
            self.slots.register(state, self._hash(sequence, start + num_tokens), b"", ())
        before, own = sequence.states
        self.slots.release([*([state] if num_tokens else ()), *([before] if before != own else ())])
        sequence.states, sequence.kept_state = (own, own), (0, 0)
        done = sequence.num_computed_tokens
        if self._keeps and self.slots.num_free and self._due(sequence, done - 1) == done:
            block_hash = self._hash(sequence, done)
            if not self.slots.match([block_hash]):
                self.slots.register(own, block_hash, b"", ())
                [following] = self.slots.allocate(1)
                sequence.states = (own, following)

    @property
    def num_draftable_sequences(self) -> int:
        """That a draft can be begun for in a step."""
        return self.slots.num_free if self._config.num_states else self._config.max_batch_size

    def num_draftable(self, sequence: Sequence) -> int:
        """Tokens that its next chunk, which is planned, may have more: up to the next place where a state is kept."""
        if not self._config.num_states:
            return MAX_DRAFTED
        if not self.slots.num_free or sequence.kept_state[1]:  # a chunk keeps one state
            return 0
        return self._due(sequence, sequence.num_tokens) - sequence.num_tokens if self._keeps else MAX_DRAFTED

    def begin_draft(self, sequence: Sequence) -> None:
        if self._config.num_states:
            [sequence.drafted_state] = self.slots.allocate(1)

    def end_draft(self, sequence: Sequence, *, keeps: bool) -> None:
        """What comes before the drafts has been computed. `keeps`: the state behind them is the sequence's, too."""
        state = sequence.drafted_state
        assert state is not None, "no draft was begun"
        if keeps:
            self.slots.release(list({*sequence.states}))
            sequence.states = (state, state)
        else:
            self.slots.release([state])
        sequence.drafted_state = None

    def release(self, sequence: Sequence) -> None:
        if self._config.num_states:
            self.slots.release(list(self._owned(sequence)))
            sequence.kept_state, sequence.drafted_state = (0, 0), None

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        self.slots.check_integrity(self._owned(sequence) for sequence in running if self._config.num_states)

    def _owned(self, sequence: Sequence) -> set[int]:
        state, num_tokens = sequence.kept_state
        drafted = () if sequence.drafted_state is None else (sequence.drafted_state,)
        return {*sequence.states, *([state] if num_tokens else ()), *drafted}

    @property
    def _keeps(self) -> bool:
        return self._config.num_states > 0 and self._config.settings.reuses_blocks

    def _due(self, sequence: Sequence, done: int) -> int:
        """The first place behind `done` tokens where a state is to be kept."""
        size, interval = self._config.block_size, self._config.block_size * self._config.checkpoint_blocks
        end_of_prompt = (sequence.num_prompt - 1) // size * size  # of what another prompt of these tokens may share
        places = (done // interval + 1) * interval, end_of_prompt, sequence.num_in_known_blocks
        return min(place for place in places if place > done)

    def _hash(self, sequence: Sequence, num_tokens: int) -> bytes:
        size = self._config.block_size
        return sequence.block_hashes(num_tokens // size, size)[-1]
