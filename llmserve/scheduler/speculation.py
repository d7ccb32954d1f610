"""Speculative decoding: a step also computes drafted tokens, and accepts those that sampling confirms.

A sample depends on logits, seed and position only, and logits do not depend on the number of rows in a step. So every
token, log-prob and finish reason equals that of a run without drafts, greedy or sampled. Only the number of steps
changes.

In a network with states, a wrong draft also loses the state of the accepted drafts before it, so the next step computes
these again (`StatePool`).

Each additional row costs a little (`StepCosts`). A drafted token saves a step if it and all before it are accepted. A
sequence drafts as many tokens as are worth their rows. The draft model (`DraftModel`) is used last, for all remaining
sequences at once. Its tokens must also be worth the time of its steps.
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
from llmserve.scheduler.drafts.grammar import GrammarDrafter, grammar_prior
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

# If a token is accepted with probability p, token n of a draft is the first wrong one with p**(n - 1) * (1 - p). Then
# the n - 1 before it are computed again: on average fewer than 1 / e rows per drafted token, for every n and p.
ROWS_PER_DRAFT = 1 + 1 / math.e  # for a network with states
COMPLETE = (FinishReason.END_ID, FinishReason.STOP_WORDS, FinishReason.LENGTH)


class Speculator:
    """Adds drafts to a step and verifies them. Its counters start at zero with the engine."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, states: StatePool, windows: WindowedBlocks) -> None:
        self.model: DraftModel | None = None
        self._costs = StepCosts(ROWS_PER_DRAFT if config.num_states else 1.0, config.row_times)
        self._balance = LookBalance()
        self._guided = grammar_prior()  # acceptance of all sequences with guides
        self._look_seconds = 0.0  # time spent on drafting in the last plan; 0: none
        self.num_generated = 0  # tokens of chunks with drafts
        self.num_drafted = 0
        self.num_accepted = 0
        self._num_seen = 0  # `num_accepted` when a step was last observed
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
            drafters.append(GrammarDrafter(self._guided))
        if request.draft_ids:
            drafters.append(ClientDrafter(request.draft_ids, sequence.num_prompt))
        if drafters:
            self._balance.begin_again()
        sources: list[Find] = [OwnText().find] if Speculation.LOOKUP in self._drafters else []
        if self._history is not None:
            sources.append(partial(self._history.find, owner_of(sequence)))
        if sources:
            least = 1 if self.model is None else 2  # a model's token is likelier than one after a single equal token
            drafters.append(LookupDrafter(*sources, least_matched=least))
        if Speculation.DRAFT in self._drafters and self.model is not None:
            drafters.append(self.model.drafter())
        sequence.drafters = tuple(drafters)

    def extend(self, outline: Outline) -> None:
        """Add drafts if every sequence decodes: next to a prompt, rows are not cheap. Drafts never preempt."""
        self._look_seconds = 0.0
        if (
            not self._drafters
            or not outline.chunks
            or any(chunk.sample is None or len(chunk.token_ids) > 1 + chunk.num_again for chunk in outline.chunks)
        ):
            return
        if (threshold := self._costs.threshold(len(outline.chunks))) >= 1:  # only for what clients predict
            for index, sequence in enumerate(outline.sequences):
                for drafter in sequence.drafters:
                    if isinstance(drafter, ClientDrafter):
                        self._draft(outline, index, drafter, threshold)
        elif self._balance.is_due():
            began = time.perf_counter()
            self._look(outline, threshold)
            self._look_seconds = time.perf_counter() - began

    def _look(self, outline: Outline, threshold: float) -> None:
        left = [
            index
            for index, sequence in enumerate(outline.sequences)
            if not any(self._draft(outline, index, drafter, threshold) for drafter in sequence.drafters)
        ]
        if self.model is not None and left:
            for index, drafter in self._ask(self.model, outline, left):
                if drafter.drafted and not self._draft(outline, index, drafter, threshold):
                    drafter.learn(1, 0)  # the guide does not allow it, or there is no room

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn from the time of a committed step. Steps with a prompt say nothing about the cost of rows."""
        num_accepted, self._num_seen = self.num_accepted - self._num_seen, self.num_accepted
        num_rows = plan.num_tokens
        if self._drafters and sum(max(1, chunk.num_again + chunk.num_samples) for chunk in plan.chunks) == num_rows:
            self._costs.observe(num_rows, seconds)
        if self._look_seconds:
            self._balance.add(num_accepted / len(plan.chunks) - self._look_seconds / seconds)

    def keep(self, plan: StepPlan, hidden: HiddenRows | None, running: Mapping[int, Sequence]) -> None:
        """Pass a step's hidden rows to a model that drafts with them. Call it before `commit`."""
        if self.model is not None and hidden is not None:
            self.model.keep(plan, hidden, running)

    def verify(
        self, sequence: Sequence, chunk: Chunk, drawn: Iterable[tuple[int, float]], scores: ChunkScores, now_ns: int
    ) -> list[TokenEvent]:
        """Accept samples up to the first that ends the answer or differs from the draft."""
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
        """Report the valid tokens of the verified chunk with `advance`, and release the blocks of the others."""
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
        """Forget a sequence that stopped running. Only complete answers that allow drafts enter the history."""
        if self._history is not None and sequence.drafters and sequence.finish_reason in COMPLETE:
            self._history.add(sequence)
        if self.model is not None:
            self.model.release(sequence)

    def check_integrity(self, running: Collection[int]) -> None:
        if self.model is not None:
            self.model.check_integrity(running)

    def _draft(self, outline: Outline, index: int, drafter: Drafter, threshold: float) -> bool:
        """Extend the sequence's chunk by a draft of this drafter. Returns whether there is one."""
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
        """Let the model draft for these sequences of the outline. The more sequences share its step, the less it costs
        each, so sequences that are not worth a draft are left out first."""
        asking = [
            (index, drafter)
            for index in indexes
            if (drafters := outline.sequences[index].drafters) and isinstance(drafter := drafters[-1], ModelDrafter)
        ][: self._states.num_draftable_sequences]

        def threshold_of(num_sequences: int) -> float:
            cost = model.cost(max(1, num_sequences), self._costs.seconds(1))
            return self._costs.threshold(len(outline.chunks), cost)

        num_asking = len(asking)
        for _ in range(2):
            threshold = threshold_of(num_asking)
            num_asking = sum(drafter.num_likely(threshold) > 0 for _, drafter in asking)
        if not num_asking:
            model.rest()
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
        """The most tokens to draft: limited by the step, the answer, free or own blocks, windows and states."""
        num_blocks = len(sequence.block_table) + self._pool.num_free - self._windows.num_promised
        room = num_blocks * self._config.block_size - sequence.num_tokens
        beside = min(self._states.num_draftable(sequence), self._windows.num_draftable(sequence))
        return min(outline.num_left, sequence.num_draftable, room, beside)

    def _extend_table(self, sequence: Sequence, num_drafted: int) -> None:
        num_missing = self._config.num_blocks_for(sequence.num_tokens + num_drafted) - len(sequence.block_table)
        if num_missing > 0:
            sequence.block_table.extend(self._pool.allocate(num_missing))


def _allowed(sequence: Sequence, drafted: Seq[int]) -> Seq[int]:
    """The part of the draft that the sequence's guide allows."""
    if sequence.matcher is None or not drafted:
        return drafted
    return drafted[: sequence.matcher.num_allowed(drafted)]
