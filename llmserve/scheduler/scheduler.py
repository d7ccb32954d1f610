"""In-flight batching: which tokens of which sequences the next step computes.

One loop per step, on one thread:

    updates = scheduler.expire()            # sequences whose deadline has passed
    plan = scheduler.schedule()             # None: nothing to do
    result = runner.step(plan)
    updates += scheduler.commit(plan, result.tokens, result.log_probs, result.scores)

For a runner that can begin a step before the previous step's tokens are known, `foresee` plans the next step.

Order. A sequence's place is its arrival number, moved forward by `priority_step` places per priority level. The waiting
queue is sorted by place and started in this order, so small prompts do not overtake a large one.

No starvation. The running sequence with the best place is never preempted, and its length is limited, so it ends. So
every running sequence ends or is preempted, and the head of the queue starts. A later arrival overtakes a waiting
sequence only by priority: at most `priority_step` arrivals per level of difference.

This is the order within a tenant. `fairness.py` decides between tenants.
"""

from __future__ import annotations

import bisect
import heapq
import time
from array import array
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from types import MappingProxyType
from typing import TypeAlias

from llmserve.core import Tenant, TokenEvent
from llmserve.scheduler.blocks import BlockPool
from llmserve.scheduler.fairness import Fairness, Rank
from llmserve.scheduler.outline import Outline
from llmserve.scheduler.plan import NO_SCORES, ChunkScores, StepPlan
from llmserve.scheduler.reservations import Reservations
from llmserve.scheduler.sequence import Sequence
from llmserve.scheduler.settings import SchedulerConfig
from llmserve.scheduler.speculation import Speculator
from llmserve.scheduler.states import StatePool
from llmserve.scheduler.windows import WindowedBlocks

Update = tuple[int, TokenEvent]  # sequence id, event
Order: TypeAlias = Callable[[Sequence], tuple[Rank, tuple[int, int]]]  # the last one is preempted first
UNRANKED: Rank = (0.0, 0.0)


class Scheduler:
    """Owns the block pool, the waiting queue and the running sequences. Not thread-safe."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.settings.block_listener)
        self.states = StatePool(config)
        self.windows = WindowedBlocks(config, self.pool)
        self.waiting: list[Sequence] = []  # sorted by place
        self.running: dict[int, Sequence] = {}
        self.num_preemptions = 0  # since the start
        self.num_generated = 0  # tokens of steps without drafts
        self.speculator = Speculator(config, self.pool, self.states, self.windows)
        self._clock = clock
        self._wall_clock_ns = wall_clock_ns
        self._sequences: dict[int, Sequence] = {}  # waiting and running
        self._deadlines: list[tuple[float, int]] = []  # heap; may contain sequences that have ended
        self._reservations = Reservations(config, self.pool, self.windows, self.running.values())
        self._fairness = Fairness(config, self._reservations.num_guaranteed)
        self._advanced: StepPlan | None = None  # the plan given to `foresee`, until it is committed

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def num_sequences(self) -> Mapping[Tenant, int]:
        """Waiting and running sequences of every tenant that has any."""
        return self._fairness.num_sequences()

    @property
    def num_paused(self) -> int:
        """Number of preempted sequences in the queue."""
        return sum(1 for sequence in self.waiting if sequence.first_scheduled_ns)

    def runs(self, sequence_id: int) -> bool:
        return sequence_id in self.running

    def add(self, sequence: Sequence) -> None:
        """Add a valid sequence to the queue. Ids must increase with arrival."""
        self._sequences[sequence.id] = sequence
        self.speculator.arrive(sequence)
        self._fairness.arrive(sequence.tenant)
        bisect.insort(self.waiting, sequence, key=self._place)
        if (deadline := sequence.request.deadline) is not None:
            heapq.heappush(self._deadlines, (deadline, sequence.id))
            if len(self._deadlines) > 2 * len(self._sequences) + 64:
                self._deadlines = sorted(entry for entry in self._deadlines if entry[1] in self._sequences)

    def cancel(self, sequence_id: int) -> None:
        """Remove a sequence and free its blocks. Does nothing if it has ended."""
        if (sequence := self._sequences.get(sequence_id)) is not None:
            self._remove(sequence)

    def shareable_hashes(self, sequence: Sequence) -> list[bytes]:
        """Hashes of the blocks that a sequence may reuse."""
        return sequence.block_hashes(self._num_shareable(sequence.max_num_found), self.config.block_size)

    def expire(self) -> list[Update]:
        """End the sequences whose deadline has passed."""
        now = self._clock()
        updates: list[Update] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = self._sequences.get(heapq.heappop(self._deadlines)[1])
            if sequence is not None:
                updates.append((sequence.id, sequence.time_out()))
                self._remove(sequence)
        return updates

    def schedule(self) -> StepPlan | None:
        """Plan one step.

        There is no prefill phase and no decode phase. A step computes pending tokens of sequences, `max_num_tokens` at
        most. Decoding sequences go first: they have one pending token, and those whose state a wrong draft has lost.
        Then other running sequences, then new ones. At most `max_num_tokens` sequences run, so every decoding one gets
        its token in every step, whatever prompts arrive.
        """
        outline = Outline(self.config.max_num_tokens, needs_whole=self.config.needs_whole)
        is_contested = self._fairness.is_contested
        if is_contested:
            self._admit_fairly()
        order = self._order()
        for sequence in sorted(self.running.values(), key=lambda s: (not s.is_decoding, order(s))):
            self._fairness.shorten(outline, sequence)
            # a sequence before it may have preempted it
            is_wanted = outline.has_room(sequence) and sequence.id in self.running and not sequence.is_complete
            if is_wanted and self._grow(sequence, order):
                self._take(outline, sequence)
        if not is_contested:
            self._start_waiting(outline)
        self.speculator.extend(outline)
        return outline.plan()

    def foresee(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after `plan`, which is the last plan and is running. Tokens that it samples are UNSEEN.

        None: there is nothing to plan, the next step depends on these tokens, or a sequence would be preempted. In any
        case, commit `plan` next. A sequence that ends with it computes one more token, which is dropped.
        """
        if not self._is_foreseeable(plan):
            return None
        self._advanced = plan
        for chunk in plan.chunks:
            if (sequence := self.running.get(chunk.sequence_id)) is not None:
                self._advance(sequence, chunk.start, chunk.end)
                if chunk.sample is not None:
                    sequence.expect()
        return self.schedule()

    def commit(
        self,
        plan: StepPlan,
        tokens: Seq[int],
        log_probs: Seq[float],
        scores: Mapping[int, ChunkScores] = MappingProxyType({}),
    ) -> list[Update]:
        """Record the results of a step: a token and log-prob per sample, and `scores` by chunk, if requested."""
        now_ns = self._wall_clock_ns()
        updates: list[Update] = []
        end = 0
        for index, chunk in enumerate(plan.chunks):
            begin, end = end, end + chunk.num_samples
            sequence = self.running.get(chunk.sequence_id)
            if sequence is None:  # cancelled during the step, or ended before
                continue
            found = scores.get(index, NO_SCORES)
            if end - begin > 1:
                drawn = zip(tokens[begin:end], log_probs[begin:end], strict=True)
                events = self.speculator.verify(sequence, chunk, drawn, found, now_ns)
                updates += [(sequence.id, event) for event in events]
                self.speculator.settle(sequence, chunk, self._advance)
            else:
                if plan is not self._advanced:
                    self._advance(sequence, chunk.start, chunk.end)
                sequence.score_prompt(chunk, found)
                event = sequence.append(tokens[begin], log_probs[begin], now_ns, found) if end > begin else None
                event = sequence.pool(found, now_ns) if chunk.pooled else event
                updates += [] if event is None else [(sequence.id, event)]
                self.num_generated += end - begin
            if sequence.finish_reason:
                self._remove(sequence)
        assert end == len(tokens) == len(log_probs), "other samples than were planned"
        self._advanced = None
        return updates

    def check_integrity(self) -> None:
        """Assert every invariant. Fast enough to run whenever the scheduler is idle."""
        self.states.check_integrity(self.running.values())
        self.speculator.check_integrity(self.running)
        self.windows.check_integrity(self.running.values())
        self.pool.check_integrity(map(self.windows.owned, self.running.values()))
        self._fairness.check_integrity(self._sequences.values())
        assert len(self.waiting) + len(self.running) == len(self._sequences), "a sequence is lost"
        assert self.waiting == sorted(self.waiting, key=self._place), "the queue is out of order"
        assert not any(sequence.block_table for sequence in self.waiting), "a waiting sequence owns blocks"
        assert len(self.running) <= self.config.max_num_running, "too many sequences run"
        assert self._reservations.num_unreserved >= 0, "a reserved block has been given away"
        for sequence in self.running.values():
            assert 0 < sequence.num_pending <= sequence.num_tokens, "a running sequence has nothing to compute"
            assert sequence.num_computed_tokens <= len(sequence.block_table) * self.config.block_size

    def _place(self, sequence: Sequence) -> tuple[int, int]:
        """Place in the queue; the lowest starts first, and the highest is preempted first."""
        return sequence.id - sequence.request.priority * self.config.settings.priority_step, sequence.id

    def _is_foreseeable(self, plan: StepPlan) -> bool:
        """Whether the next step does not depend on the tokens that `plan` samples, and has enough blocks."""
        if self._fairness.is_contested and self.waiting:
            return False
        if any(chunk.drafted for chunk in plan.chunks):
            return False
        planned = (self.running.get(chunk.sequence_id) for chunk in plan.chunks)
        if not all(sequence is None or sequence.is_foreseeable for sequence in planned):
            return False
        num_blocks_for = self.config.num_blocks_for
        num_missing = sum(num_blocks_for(s.num_tokens + 1) - len(s.block_table) for s in self.running.values())
        return num_missing <= self.pool.num_free - self.windows.num_promised

    def _advance(self, sequence: Sequence, start: int, end: int) -> None:
        """Record that tokens `start` to `end` are computed, and make the blocks that they fill available to others."""
        sequence.num_computed_tokens, sequence.num_again = end, max(0, sequence.num_again - (end - start))
        size, first = self.config.block_size, start // self.config.block_size
        if first < end // size and self.config.settings.reuses_blocks:
            hashes = sequence.block_hashes(end // size, size)
            for index in range(first, end // size):
                parent = hashes[index - 1] if index else sequence.cache_root
                token_ids = sequence.token_ids[index * size : (index + 1) * size]
                self.pool.register(sequence.block_table[index], hashes[index], parent, token_ids)
                self.windows.register(sequence, index, hashes[index])
        self.states.advance(sequence, start)
        self.windows.advance(sequence)

    def _start_waiting(self, outline: Outline) -> None:
        started = set()
        for sequence in self.waiting:
            if not outline.has_room(sequence) or len(self.running) == self.config.max_num_running:
                break
            if self._waits_for_leader(sequence):
                continue
            if not self._start(sequence):
                break
            self._take(outline, sequence)
            started.add(sequence)
        if started:
            self.waiting = [sequence for sequence in self.waiting if sequence not in started]

    def _admit_fairly(self) -> None:
        """Start waiting sequences, of the tenant with the lowest rank first, and preempt others above the fair level.

        As many tokens as a step can compute next to the decoding sequences. The step's order decides which it computes.
        """
        num_left = self.config.max_num_tokens - sum(s.num_pending for s in self.running.values() if s.is_decoding)
        queues: dict[Tenant, list[Sequence]] = {}
        for sequence in reversed(self.waiting):
            queues.setdefault(sequence.tenant, []).append(sequence)
        while queues and num_left > 0:
            ranks = self._fairness.ranks(self.running.values())
            tenant = min(queues, key=lambda tenant: (ranks[tenant], self._place(queues[tenant][-1])))
            sequence = queues[tenant].pop()
            if not queues[tenant]:
                del queues[tenant]
            if self._waits_for_leader(sequence):
                continue
            if not self._can_start(sequence) and not self._displace_for(sequence):
                break
            self._leave_queue(sequence)
            num_left -= sequence.num_pending

    def _can_start(self, sequence: Sequence) -> bool:
        """Start the sequence if the batch has a place and the pool has blocks. Returns whether it started."""
        return len(self.running) < self.config.max_num_running and self._start(sequence)

    def _displace_for(self, newcomer: Sequence) -> bool:
        """Preempt sequences of tenants above the fair level until `newcomer` starts. Preempt none if it could not start
        even so, or if its own tenant would exceed the level."""
        running = self.running.values()
        if not self._fairness.may_displace(newcomer, running):
            return False
        leaving = list(self._fairness.displaceable(newcomer, running, self._place))
        staying = [sequence for sequence in running if sequence not in leaving]
        if not (leaving and self._reservations.has_room_without(leaving, staying, newcomer)):
            return False
        for sequence in leaving:
            sequence.num_displaced += 1
            self._preempt(sequence)
            if self._can_start(newcomer):
                return True
        return False

    def _take(self, outline: Outline, sequence: Sequence) -> None:
        most = self.windows.most_tokens(sequence, lambda: self._reservations.num_unreserved)
        self._fairness.serve(sequence.tenant, outline.take(sequence, most, self.states, self.windows))

    def _order(self) -> Order:
        """The order of sequences in a step; by place if there is only one tenant."""
        if not self._fairness.is_contested:
            return lambda sequence: (UNRANKED, self._place(sequence))
        ranks = self._fairness.ranks(self.running.values())
        return lambda sequence: (ranks[sequence.tenant], self._place(sequence))

    def _waits_for_leader(self, sequence: Sequence) -> bool:
        """Whether the request's first sequence is still computing prompt blocks that this one can reuse."""
        leader = sequence.leader
        return (
            leader is not None
            and leader.id in self._sequences
            and leader.num_computed_tokens < leader.num_prompt
            and self._num_shareable(leader.num_tokens - 1) > 0
        )

    def _num_shareable(self, num_tokens: int) -> int:
        """Number of blocks of the first `num_tokens` tokens that may come from the cache."""
        return num_tokens // self.config.block_size if self.config.settings.reuses_blocks else 0

    def _start(self, sequence: Sequence) -> bool:
        """Give a waiting sequence the blocks of all its known tokens. False if it must wait, by the policy."""
        config = self.config
        hashes = self.shareable_hashes(sequence)
        shared, state = self.states.match(sequence, hashes, self.windows)
        hashes = hashes[: len(shared)]
        num_needed = self._reservations.num_guaranteed(sequence) - sum(map(self.pool.is_used, shared))
        if num_needed > self._reservations.num_unreserved or not self.states.start(sequence, state):
            return False
        self.pool.acquire(shared)
        self.windows.start(sequence, hashes)
        missing = self.pool.allocate(config.num_blocks_for(sequence.num_tokens) - len(shared))
        sequence.block_table = array("i", shared + missing)
        sequence.num_computed_tokens = len(shared) * config.block_size
        if not sequence.first_scheduled_ns:
            sequence.first_scheduled_ns = self._wall_clock_ns()
            sequence.num_cached_tokens = sequence.num_computed_tokens
        self.running[sequence.id] = sequence
        return True

    def _grow(self, sequence: Sequence, order: Order) -> bool:
        """Allocate blocks for the known tokens. False if `sequence` itself was preempted.

        Only decoding sequences can need a block. They are planned in this order: a preempted one is not planned yet.
        """
        num_missing = self.config.num_blocks_for(sequence.num_tokens) - len(sequence.block_table)
        while num_missing and num_missing > self.pool.num_free - self.windows.num_promised:
            victim = self._gives_way(sequence, order)
            self._preempt(victim)
            if victim is sequence:
                return False
        if num_missing:
            sequence.block_table.extend(self.pool.allocate(num_missing))
        return True

    def _gives_way(self, sequence: Sequence, order: Order) -> Sequence:
        """The sequence to preempt: a later one of a tenant above the fair level, or else its own tenant's last one."""
        running = self.running.values()
        if self._fairness.is_contested:
            for other in self._fairness.displaceable(sequence, running, self._place):
                if order(other) > order(sequence):
                    other.num_displaced += 1
                    return other
        return max((other for other in running if other.tenant == sequence.tenant), key=self._place)

    def _preempt(self, sequence: Sequence) -> None:
        """Return a sequence to the queue, at its old place. Its tokens are computed again, or found in the cache."""
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        self._release(sequence)
        bisect.insort(self.waiting, sequence, key=self._place)

    def _remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.id]
        self._fairness.leave(sequence.tenant)
        if sequence.id in self.running:
            self._release(sequence)
        else:
            self._leave_queue(sequence)

    def _leave_queue(self, sequence: Sequence) -> None:
        del self.waiting[bisect.bisect_left(self.waiting, self._place(sequence), key=self._place)]

    def _release(self, sequence: Sequence) -> None:
        del self.running[sequence.id]
        self.pool.release(sequence.block_table)
        self.windows.release(sequence)
        self.states.release(sequence)
        self.speculator.release(sequence)
        sequence.block_table, sequence.num_computed_tokens, sequence.num_again = array("i"), 0, 0
