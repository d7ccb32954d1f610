"""A step plan under construction."""

from __future__ import annotations

from llmserve.scheduler.plan import Chunk, StepPlan
from llmserve.scheduler.sequence import Sequence
from llmserve.scheduler.states import StatePool
from llmserve.scheduler.windows import WindowedBlocks


class Outline:
    """The chunks of a step so far, their sequences, and the number of tokens left."""

    def __init__(self, max_num_tokens: int, *, needs_whole: bool = False) -> None:
        """`needs_whole`: all tokens of a sequence must be in one step."""
        self.chunks: list[Chunk] = []
        self.sequences: list[Sequence] = []
        self.num_left = max_num_tokens
        self._max_num_tokens = max_num_tokens
        self._needs_whole = needs_whole

    @property
    def num_tokens(self) -> int:
        return self._max_num_tokens - self.num_left

    def has_room(self, sequence: Sequence) -> bool:
        """Whether some of its tokens fit, or all of them if `needs_whole`. Any sequence fits into an empty step."""
        return self.num_left >= (sequence.num_pending if self._needs_whole else 1)

    def take(self, sequence: Sequence, num_most: int, states: StatePool, windows: WindowedBlocks) -> int:
        """Add the next chunk of a sequence, at most `num_most` tokens. Returns their number."""
        num_tokens = min(num_most, self.num_left, states.most_tokens(sequence))
        states.prepare(sequence, num_tokens)
        windows.prepare(sequence, num_tokens)
        self.chunks.append(sequence.chunk(num_tokens))
        self.sequences.append(sequence)
        self.num_left -= num_tokens
        return num_tokens

    def shorten(self, num_tokens: int) -> None:
        """Limit the step to `num_tokens`, or to what it already has."""
        num_dropped = max(0, self._max_num_tokens - max(num_tokens, self.num_tokens))
        if not self._needs_whole:
            self._max_num_tokens -= num_dropped
            self.num_left -= num_dropped

    def replace(self, index: int, chunk: Chunk) -> None:
        self.num_left -= len(chunk.token_ids) - len(self.chunks[index].token_ids)
        self.chunks[index] = chunk

    def plan(self) -> StepPlan | None:
        """The plan, or None if it is empty. Chunks with the same adapter are adjacent: they are multiplied together."""
        chunks = sorted(self.chunks, key=lambda chunk: chunk.adapter)
        return StepPlan(tuple(chunks)) if chunks else None
