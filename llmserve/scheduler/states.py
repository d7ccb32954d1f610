"""Ownership of state slots. A network with states (such as Mamba) keeps a state of fixed size for each sequence.

A running sequence has a slot that its next chunk reads and one that it writes. They differ if the sequence starts from
a checkpoint, or has just left one behind. A checkpoint is a kept state, found by the hash of the blocks before it. It
is made without a copy: the sequence continues in another slot. A chunk can also keep a state before its end, in a third
slot, so that few prompts need an additional step.

A prefix can be reused if its blocks and a checkpoint at their end are known. So there are checkpoints

* at the last block of a prompt that another prompt may share,
* at the end of the prefix that a prompt shares with earlier ones, such as a system prompt,
* after every `checkpoint_blocks` blocks.

A chunk with drafts writes its last state into an additional slot, and the state before the drafts into the sequence's
own slot. If all drafts are accepted, the sequence continues in the first. Otherwise it returns to the second and
computes the accepted drafts again. So each step makes progress by at least one token.

Slots are allocated by the same rules as blocks.
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
    """Owns the state slots. Does nothing for a network without states."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.slots = BlockPool(config.num_states)

    @property
    def num_free(self) -> int:
        """Number of slots that no running sequence has."""
        return self.slots.num_free

    def match(self, sequence: Sequence, hashes: Seq[bytes], windows: WindowedBlocks) -> tuple[list[int], int]:
        """Blocks of the longest known prefix of `hashes` that ends at a known state, and that state."""
        blocks = windows.pool.match(hashes)
        count = windows.longest(hashes[: len(blocks)])
        if not self._config.num_states:
            return blocks[:count], NO_STATE
        sequence.num_in_known_blocks = len(blocks) * self._config.block_size
        while count:
            for state in self.slots.match(hashes[count - 1 : count]):
                if self.slots.is_used(state) or self.slots.num_free > 1:  # the sequence also needs its own slot
                    return blocks[:count], state
            count = windows.longest(hashes[: count - 1])
        return [], NO_STATE

    def start(self, sequence: Sequence, state: int) -> bool:
        """Give the sequence a slot, and `state` from `match` to start from. False if no slot is free."""
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
        """The most tokens of its next chunk, which can keep one state before its end and one at its end."""
        if not self._keeps:
            return sequence.num_pending
        return self._due(sequence, self._due(sequence, sequence.num_computed_tokens)) - sequence.num_computed_tokens

    def prepare(self, sequence: Sequence, num_tokens: int) -> None:
        """Prepare a chunk of `num_tokens` tokens: allocate a slot if a state must be kept before its end."""
        done = sequence.num_computed_tokens
        if not (self._keeps and self.slots.num_free and (due := self._due(sequence, done)) < done + num_tokens):
            return
        if not self.slots.match([self._hash(sequence, due)]):
            [state] = self.slots.allocate(1)
            sequence.kept_state = (state, due - done)

    def advance(self, sequence: Sequence, start: int) -> None:
        """Record that its chunk from `start` on is computed. This may leave states for other sequences."""
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
        """Number of sequences that can have drafts in a step."""
        return self.slots.num_free if self._config.num_states else self._config.max_batch_size

    def num_draftable(self, sequence: Sequence) -> int:
        """Number of tokens that can be added to its planned chunk: up to the next position where a state is kept."""
        if not self._config.num_states:
            return MAX_DRAFTED
        if not self.slots.num_free or sequence.kept_state[1]:  # a chunk keeps one state
            return 0
        return self._due(sequence, sequence.num_tokens) - sequence.num_tokens if self._keeps else MAX_DRAFTED

    def begin_draft(self, sequence: Sequence) -> None:
        if self._config.num_states:
            [sequence.drafted_state] = self.slots.allocate(1)

    def end_draft(self, sequence: Sequence, *, keeps: bool) -> None:
        """Record that the tokens before the drafts are computed. `keeps`: so are the drafts, which were accepted."""
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
        """The first position after `done` tokens where a state must be kept."""
        size, interval = self._config.block_size, self._config.block_size * self._config.checkpoint_blocks
        end_of_prompt = (sequence.num_prompt - 1) // size * size  # tokens that an equal prompt may reuse
        places = (done // interval + 1) * interval, end_of_prompt, sequence.num_in_known_blocks
        return min(place for place in places if place > done)

    def _hash(self, sequence: Sequence, num_tokens: int) -> bytes:
        size = self._config.block_size
        return sequence.block_hashes(num_tokens // size, size)[-1]
