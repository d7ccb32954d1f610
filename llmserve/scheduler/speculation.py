"""Speculative decoding: a step also computes tokens that a sequence may go on with, and keeps those that are drawn.

A draw depends on logits, seed and position only, and logits do not depend on how many rows a step has. So every token,
log-prob and finish reason is the one of a run without drafts, greedy or sampled. What changes is how many steps an
answer takes.

A row more costs a little (`StepCosts`); a drafted token saves a step if it and all before it are drawn. A sequence
drafts as many tokens as are worth their rows.
"""

from __future__ import annotations

from collections.abc import Iterable

from llmserve.core import TokenEvent
from llmserve.scheduler.blocks import BlockPool
from llmserve.scheduler.drafting import LookupDrafter, Speculation, StepCosts
from llmserve.scheduler.outline import Outline
from llmserve.scheduler.plan import Chunk, ChunkScores, StepPlan
from llmserve.scheduler.sequence import Sequence
from llmserve.scheduler.settings import SchedulerConfig


class Speculator:
    """Adds drafts to a step, and verifies them. Counts since the start."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self._costs = StepCosts()
        self.num_generated = 0  # tokens, in chunks with drafts
        self.num_drafted = 0
        self.num_accepted = 0
        self._is_on = config.settings.speculation is Speculation.LOOKUP
        self._config = config
        self._pool = pool

    def arrive(self, sequence: Sequence) -> None:
        if self._is_on and sequence.may_draft:
            sequence.drafter = LookupDrafter()

    def extend(self, outline: Outline) -> None:
        """Where every sequence decodes: beside a prompt, rows are not cheap. Nobody gives way to a draft."""
        if not self._is_on or len(outline.chunks) < outline.num_tokens:
            return
        threshold = self._costs.threshold(outline.num_tokens)
        for index, sequence in enumerate(outline.sequences):
            drafter = sequence.drafter
            if drafter is not None and (place := drafter.match(sequence.token_ids)) is not None:
                limit = min(outline.num_left, sequence.num_draftable, self._room(sequence))
                if drafted := drafter.draft(sequence.token_ids, place, limit, threshold):
                    self._extend_table(sequence, len(drafted))
                    outline.replace(index, sequence.drafted_chunk(drafted))

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """What a step took. Those with a prompt in them say nothing about rows."""
        num_rows = plan.num_tokens
        if self._is_on and sum(max(1, chunk.num_samples) for chunk in plan.chunks) == num_rows:
            self._costs.observe(num_rows, seconds)

    def verify(
        self, sequence: Sequence, chunk: Chunk, drawn: Iterable[tuple[int, float]], scores: ChunkScores, now_ns: int
    ) -> list[TokenEvent]:
        """Take the tokens drawn, up to the first that ends the answer or is not the one that was drafted."""
        drafted = chunk.drafted
        events: list[TokenEvent | None] = []
        for place, (token, log_prob) in enumerate(drawn):
            events.append(sequence.append(token, log_prob, now_ns, scores.of_sample(place)))
            if sequence.finish_reason or (place < len(drafted) and token != drafted[place]):
                break
        num_accepted = len(events) - 1
        self.num_generated += len(events)
        self.num_drafted += len(drafted)
        self.num_accepted += num_accepted
        assert sequence.drafter is not None, "somebody else has drafted"
        sequence.drafter.learn(len(drafted), num_accepted)
        return [event for event in events if event is not None]

    def forget_rejected(self, sequence: Sequence) -> None:
        """Blocks beyond the tokens that are known."""
        num_known = self._config.num_blocks_for(sequence.num_tokens)
        self._pool.release(sequence.block_table[num_known:])
        del sequence.block_table[num_known:]

    def _room(self, sequence: Sequence) -> int:
        """Tokens that fit into its blocks and those that nobody has."""
        num_blocks = len(sequence.block_table) + self._pool.num_free
        return num_blocks * self._config.block_size - sequence.num_tokens

    def _extend_table(self, sequence: Sequence, num_drafted: int) -> None:
        num_missing = self._config.num_blocks_for(sequence.num_tokens + num_drafted) - len(sequence.block_table)
        if num_missing > 0:
            sequence.block_table.extend(self._pool.allocate(num_missing))
