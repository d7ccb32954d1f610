"""Speculative decoding: a step also computes tokens that a sequence may go on with, and keeps those that are drawn.

A draw depends on logits, seed and position only, and logits do not depend on how many rows a step has. So every token,
log-prob and finish reason is the one of a run without drafts, greedy or sampled. What changes is how many steps an
answer takes.

In a network with states, a draft that is wrong takes the state behind it along: tokens before it that were drawn are
computed again in the next step (`StatePool`).

A row more costs a little (`StepCosts`); a drafted token saves a step if it and all before it are drawn. A sequence
drafts as many tokens as are worth their rows. A smaller network (`DraftModel`) is asked last, for all that are left at
once; its tokens have to be worth its own steps, too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from functools import partial

from llmserve.core import FinishReason, TokenEvent
from llmserve.scheduler.blocks import BlockPool
from llmserve.scheduler.drafts.client import ClientDrafter
from llmserve.scheduler.drafts.drafter import MAX_DRAFTED, Drafter, Speculation
from llmserve.scheduler.drafts.grammar import GrammarDrafter
from llmserve.scheduler.drafts.history import History, owner_of
from llmserve.scheduler.drafts.lookup import LookupDrafter
from llmserve.scheduler.drafts.model import DraftModel
from llmserve.scheduler.drafts.model_drafter import ModelDrafter, Wish
from llmserve.scheduler.drafts.own_text import Find, OwnText
from llmserve.scheduler.outline import Outline
from llmserve.scheduler.plan import Chunk, ChunkScores, HiddenRows, StepPlan
from llmserve.scheduler.sequence import Sequence
from llmserve.scheduler.settings import SchedulerConfig
from llmserve.scheduler.states import StatePool
from llmserve.scheduler.step_costs import LookBalance, StepCosts
from llmserve.scheduler.windows import WindowedBlocks

# With a token's probability p, token n of a draft is wrong behind n - 1 that were drawn with p**(n - 1) * (1 - p). Then
# these are computed again: on average less than 1 / e rows, for every n and p.
ROWS_PER_DRAFT = 1 + 1 / math.e  # in a network with states
COMPLETE = (FinishReason.END_ID, FinishReason.STOP_WORDS, FinishReason.LENGTH)


class Speculator:
    """Adds drafts to a step, and verifies them. Counts since the start."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, states: StatePool, windows: WindowedBlocks) -> None:
        self.model: DraftModel | None = None  # of a smaller engine
        self._costs = StepCosts(ROWS_PER_DRAFT if config.num_states else 1.0)
        self._balance = LookBalance()
        self._look_seconds = 0.0  # in the step that was planned last; 0: drafts were not looked for
        self.num_generated = 0  # tokens, in chunks with drafts
        self.num_drafted = 0
        self.num_accepted = 0
        self._num_seen = 0  # of the accepted ones, when a step was observed last
        self._drafters = config.settings.speculation
        shares_answers = Speculation.HISTORY in self._drafters and config.settings.reuses_blocks
        self._history = History() if shares_answers else None
        self._config = config
        self._pool = pool
        self._states = states
        self._windows = windows

    def arrive(self, sequence: Sequence) -> None:
        request = sequence.request
        if not (self._drafters and request.speculation):
            return
        drafters: list[Drafter] = []
        if Speculation.GRAMMAR in self._drafters and sequence.matcher is not None:
            drafters.append(GrammarDrafter())
        if request.draft_ids:
            drafters.append(ClientDrafter(request.draft_ids, sequence.num_prompt))
        if drafters:
            self._balance.begin_again()
        sources: list[Find] = [OwnText().find] if Speculation.LOOKUP in self._drafters else []
        if self._history is not None:
            sources.append(partial(self._history.find, owner_of(sequence)))
        if sources:
            drafters.append(LookupDrafter(*sources))
        if Speculation.DRAFT in self._drafters and self.model is not None:
            drafters.append(self.model.drafter())
        sequence.drafters = tuple(drafters)

    def extend(self, outline: Outline) -> None:
        """Where every sequence decodes: beside a prompt, rows are not cheap. Nobody gives way to a draft."""
        self._look_seconds = 0.0
        if not self._drafters or any(
            chunk.sample is None or len(chunk.token_ids) > 1 + chunk.num_again for chunk in outline.chunks
        ):
            return
        if self._balance.is_due():
            began = time.perf_counter()
            self._look(outline)
            self._look_seconds = time.perf_counter() - began

    def _look(self, outline: Outline) -> None:
        threshold = self._costs.threshold(len(outline.chunks))
        left = [
            index
            for index, sequence in enumerate(outline.sequences)
            if not any(self._draft(outline, index, drafter, threshold) for drafter in sequence.drafters)
        ]
        if self.model is not None and left:
            for index, drafter in self._ask(self.model, outline, left):
                if drafter.drafted and not self._draft(outline, index, drafter, threshold):
                    drafter.learn(1, 0)  # a guide forbids it, or there is no room

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """What a step took, when it has been committed. Those with a prompt in them say nothing about rows."""
        num_accepted, self._num_seen = self.num_accepted - self._num_seen, self.num_accepted
        num_rows = plan.num_tokens
        if self._drafters and sum(max(1, chunk.num_again + chunk.num_samples) for chunk in plan.chunks) == num_rows:
            self._costs.observe(num_rows, seconds)
        if self._look_seconds:
            self._balance.add(num_accepted / len(plan.chunks) - self._look_seconds / seconds)

    def keep(self, plan: StepPlan, hidden: HiddenRows | None, running: Mapping[int, Sequence]) -> None:
        """The rows that a step has handed out, for a model that drafts with them. Before it is committed."""
        if self.model is not None and hidden is not None:
            self.model.keep(plan, hidden, running)

    def verify(
        self, sequence: Sequence, chunk: Chunk, drawn: Iterable[tuple[int, float]], scores: ChunkScores, now_ns: int
    ) -> list[TokenEvent]:
        """Take the tokens drawn, up to the first that ends the answer or is not the one that was drafted."""
        drafted = chunk.drafted
        sequence.num_drafted += len(drafted)
        events: list[TokenEvent | None] = []
        for place, (token, log_prob) in enumerate(drawn):
            sequence.num_accepted += place > 0
            if sequence.drafted_guide is not None:
                sequence.matcher = sequence.drafted_guide.matcher(place)
            events.append(sequence.append(token, log_prob, now_ns, scores.of_sample(place)))
            if sequence.finish_reason or (place < len(drafted) and token != drafted[place]):
                break
        num_accepted = len(events) - 1
        self.num_generated += len(events)
        self.num_drafted += len(drafted)
        self.num_accepted += num_accepted
        assert sequence.drafted_by is not None, "nobody has drafted"
        sequence.drafted_by.learn(len(drafted), num_accepted)
        sequence.drafted_by = sequence.drafted_guide = None
        return [event for event in events if event is not None]

    def settle(self, sequence: Sequence, chunk: Chunk, advance: Callable[[Sequence, int, int], None]) -> None:
        """Say with `advance` what the verified chunk has computed for good, and forget the rest."""
        end, before = sequence.num_tokens - 1, chunk.end - len(chunk.drafted)
        if sequence.drafted_state is None:
            advance(sequence, chunk.start, end)
        else:
            advance(sequence, chunk.start, before)
            self._states.end_draft(sequence, keeps=end == chunk.end)
            if end == chunk.end:
                advance(sequence, before, end)
            else:
                sequence.num_again = end - before
        num_known = self._config.num_blocks_for(sequence.num_tokens)
        self._pool.release(sequence.block_table[num_known:])
        del sequence.block_table[num_known:]
        self._windows.shorten(sequence, num_known)

    def release(self, sequence: Sequence) -> None:
        """It does not run any more. An answer that was cancelled, timed out or not to be drafted is not remembered."""
        if self._history is not None and sequence.drafters and sequence.finish_reason in COMPLETE:
            self._history.add(sequence)
        if self.model is not None:
            self.model.release(sequence)

    def check_integrity(self, running: Collection[int]) -> None:
        if self.model is not None:
            self.model.check_integrity(running)

    def _draft(self, outline: Outline, index: int, drafter: Drafter, threshold: float) -> bool:
        """Whether the sequence gets a draft of this drafter."""
        sequence = outline.sequences[index]
        if not (proposed := drafter.propose(sequence, threshold)):
            return False
        if drafted := _allowed(sequence, proposed[: max(0, self._limit(outline, sequence))]):
            sequence.drafted_by = drafter
            self._extend_table(sequence, len(drafted))
            self._windows.prepare(sequence, sequence.num_pending + len(drafted))
            self._states.begin_draft(sequence)
            outline.replace(index, sequence.drafted_chunk(drafted))
        return bool(drafted)

    def _ask(self, model: DraftModel, outline: Outline, indexes: Seq[int]) -> list[tuple[int, ModelDrafter]]:
        """Have the model draft for these sequences of the outline. A step of it is the cheaper for each, the more of
        them it drafts for: who would not be worth it even if all were does not count."""
        asking = [
            (index, drafter)
            for index in indexes
            if (drafters := outline.sequences[index].drafters) and isinstance(drafter := drafters[-1], ModelDrafter)
        ][: self._states.num_draftable_sequences]

        def threshold_of(num_sequences: int) -> float:
            cost = model.cost(max(1, num_sequences), self._costs.base)
            return self._costs.threshold(len(outline.chunks), cost)

        num_asking = len(asking)
        for _ in range(2):
            threshold = threshold_of(num_asking)
            num_asking = sum(drafter.num_likely(threshold) > 0 for _, drafter in asking)
        room = outline.num_left // max(1, num_asking)
        wishes = []
        for index, drafter in asking:
            sequence = outline.sequences[index]
            most = MAX_DRAFTED if drafter.num_worthwhile(threshold) else 0
            count = min(room, self._limit(outline, sequence), most)
            wishes.append(Wish(sequence, drafter, count))
        model.draft(wishes, threshold_of)
        return asking

    def _limit(self, outline: Outline, sequence: Sequence) -> int:
        """Tokens that fit into the step, the answer, the blocks that it has or nobody has, and likewise states."""
        num_blocks = len(sequence.block_table) + self._pool.num_free - self._windows.num_promised
        room = num_blocks * self._config.block_size - sequence.num_tokens
        beside = min(self._states.num_draftable(sequence), self._windows.num_draftable(sequence))
        return min(outline.num_left, sequence.num_draftable, room, beside)

    def _extend_table(self, sequence: Sequence, num_drafted: int) -> None:
        num_missing = self._config.num_blocks_for(sequence.num_tokens + num_drafted) - len(sequence.block_table)
        if num_missing > 0:
            sequence.block_table.extend(self._pool.allocate(num_missing))


def _allowed(sequence: Sequence, drafted: Seq[int]) -> Seq[int]:
    """As far as its guide lets it."""
    if sequence.matcher is None or not drafted:
        return drafted
    return drafted[: sequence.matcher.num_allowed(drafted)]
