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
    """Adds drafts to a step, and takes what was drawn after them. Counts since the start."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self._costs = StepCosts()
        self.num_generated = 0  # tokens, with and without drafts
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
        config, pool = self._config, self._pool
        threshold = self._costs.threshold(outline.num_tokens)
        for index, sequence in enumerate(outline.sequences):
            table = sequence.block_table
            room = (len(table) + pool.num_free) * config.block_size - sequence.num_tokens
            if drafted := sequence.draft(min(outline.num_left, room), threshold):
                num_missing = config.num_blocks_for(sequence.num_tokens + len(drafted)) - len(table)
                table.extend(pool.allocate(max(0, num_missing)))
                outline.replace(index, sequence.drafted_chunk(drafted))

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """What a step took. Those with a prompt in them say nothing about rows."""
        num_rows = plan.num_tokens
        if self._is_on and sum(max(1, chunk.num_samples) for chunk in plan.chunks) == num_rows:
            self._costs.observe(num_rows, seconds)

    def take(
        self, sequence: Sequence, chunk: Chunk, drawn: Iterable[tuple[int, float]], scores: ChunkScores, now_ns: int
    ) -> list[TokenEvent]:
        """The tokens drawn, up to the first that ends the answer or is not the one that was drafted."""
        drafted = chunk.drafted
        events: list[TokenEvent | None] = []
        for place, (token, log_prob) in enumerate(drawn):
            found = scores.of_sample(place) if drafted else scores
            events.append(sequence.append(token, log_prob, now_ns, found))
            if sequence.finish_reason or (place < len(drafted) and token != drafted[place]):
                break
        self.num_generated += len(events)
        if drafted and sequence.drafter is not None:
            self.num_drafted += len(drafted)
            self.num_accepted += len(events) - 1
            sequence.drafter.learn(len(drafted), len(events) - 1)
        return [event for event in events if event is not None]

    def forget_rejected(self, sequence: Sequence) -> None:
        """Blocks beyond the tokens that are known."""
        num_known = self._config.num_blocks_for(sequence.num_tokens)
        self._pool.release(sequence.block_table[num_known:])
        del sequence.block_table[num_known:]
