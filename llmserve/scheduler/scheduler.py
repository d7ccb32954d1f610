"""In-flight batching: which tokens of which sequences the next step computes.

One loop per step, on one thread:

    updates = scheduler.expire()            # sequences whose deadline has passed
    plan = scheduler.schedule()             # None: nothing to do
    result = runner.step(plan)
    updates += scheduler.commit(plan, result.tokens, result.log_probs)

Order. A sequence's place is its arrival number, moved forward by `priority_step` places per priority level. The waiting
queue is sorted by place, and nobody starts before the first that can: a large prompt is not overtaken by small ones.

Why nobody starves. The running sequence with the best place is never preempted, and its length is limited, so it ends;
so every running sequence ends or is preempted, and the head of the queue starts. A later arrival gets in front of a
waiting sequence only by priority, so at most `priority_step` of them per level of difference do.
"""

from __future__ import annotations

import bisect
import heapq
import time
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq

from llmserve.core import TokenEvent
from llmserve.scheduler.blocks import BlockPool
from llmserve.scheduler.plan import Chunk, StepPlan
from llmserve.scheduler.sequence import Sequence
from llmserve.scheduler.settings import Policy, SchedulerConfig

Update = tuple[int, TokenEvent]  # sequence id, what it has to tell


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
        self.pool = BlockPool(config.num_blocks)
        self.waiting: list[Sequence] = []  # sorted by place
        self.running: dict[int, Sequence] = {}
        self._clock = clock
        self._wall_clock_ns = wall_clock_ns
        self._sequences: dict[int, Sequence] = {}  # waiting and running
        self._deadlines: list[tuple[float, int]] = []  # heap; may name sequences that have ended

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def num_paused(self) -> int:
        """Preempted sequences that wait to be computed again."""
        return sum(1 for sequence in self.waiting if sequence.first_scheduled_ns)

    def add(self, sequence: Sequence) -> None:
        """Put a valid sequence into the queue. Ids must grow with arrival."""
        self._sequences[sequence.id] = sequence
        bisect.insort(self.waiting, sequence, key=self._place)
        if (deadline := sequence.request.deadline) is not None:
            heapq.heappush(self._deadlines, (deadline, sequence.id))

    def cancel(self, sequence_id: int) -> None:
        """Forget a sequence and free its blocks; nothing happens when it has ended already."""
        if (sequence := self._sequences.get(sequence_id)) is not None:
            self._remove(sequence)

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

        There is no prefill phase and no decode phase. Every sequence has tokens known and tokens computed, and a step
        lets the second catch up with the first, within `max_num_tokens`. Sequences that miss one token (they decode)
        go first, then running ones that miss more, then new ones. As no more than `max_num_tokens` sequences run, every
        decoding one gets its token in every step, whatever prompts arrive.
        """
        draft = _Draft(self.config.max_num_tokens)
        for sequence in sorted(self.running.values(), key=lambda s: (s.num_pending > 1, self._place(s))):
            # an earlier one may have preempted this one
            if draft.num_left and sequence.id in self.running and self._grow(sequence):
                draft.take(sequence)
        self._start_waiting(draft)
        return StepPlan(tuple(draft.chunks)) if draft.chunks else None

    def commit(self, plan: StepPlan, tokens: Seq[int], log_probs: Seq[float]) -> list[Update]:
        """Record what the step computed and sampled, one entry per chunk of `plan`."""
        now_ns = self._wall_clock_ns()
        updates: list[Update] = []
        for chunk, token, log_prob in zip(plan.chunks, tokens, log_probs, strict=True):
            sequence = self.running.get(chunk.sequence_id)
            if sequence is None:  # cancelled while the step ran
                continue
            sequence.num_computed_tokens += len(chunk.token_ids)
            self._share_full_blocks(sequence, chunk.start)
            event = sequence.append(token, log_prob, now_ns) if chunk.sample else None
            if event is not None:
                updates.append((sequence.id, event))
            if sequence.finish_reason:
                self._remove(sequence)
        return updates

    def check_integrity(self) -> None:
        """Assert every invariant; cheap enough to run whenever the scheduler is idle."""
        self.pool.check_integrity(sequence.block_table for sequence in self.running.values())
        assert len(self.waiting) + len(self.running) == len(self._sequences), "a sequence is lost"
        assert self.waiting == sorted(self.waiting, key=self._place), "the queue is out of order"
        assert not any(sequence.block_table for sequence in self.waiting), "a waiting sequence owns blocks"
        assert len(self.running) <= self.config.max_num_running, "too many sequences run"
        assert self._num_reserved() <= self.pool.num_free, "a reserved block has been given away"
        for sequence in self.running.values():
            assert 0 < sequence.num_pending <= sequence.num_tokens, "a running sequence has nothing to compute"
            assert sequence.num_computed_tokens <= len(sequence.block_table) * self.config.block_size

    def _place(self, sequence: Sequence) -> tuple[int, int]:
        """Place in the queue, lower is better; also who is preempted: the last one."""
        return sequence.id - sequence.request.priority * self.config.settings.priority_step, sequence.id

    def _start_waiting(self, draft: _Draft) -> None:
        started = set()
        for sequence in self.waiting:
            if not draft.num_left or len(self.running) == self.config.max_num_running:
                break
            if self._waits_for_leader(sequence):
                continue
            if not self._start(sequence):
                break
            draft.take(sequence)
            started.add(sequence)
        if started:
            self.waiting = [sequence for sequence in self.waiting if sequence not in started]

    def _waits_for_leader(self, sequence: Sequence) -> bool:
        """Whether the request's first sequence is still computing prompt blocks that this one can share."""
        leader = sequence.leader
        return (
            leader is not None
            and leader.id in self._sequences
            and leader.num_computed_tokens < leader.num_prompt
            and self._num_shareable(leader) > 0
        )

    def _num_shareable(self, sequence: Sequence) -> int:
        """Blocks that may come from the cache. One token at least is computed: it gives the logits."""
        return (sequence.num_tokens - 1) // self.config.block_size if self.config.settings.reuses_blocks else 0

    def _start(self, sequence: Sequence) -> bool:
        """Give a waiting sequence the blocks of all its known tokens, or return False when the policy says wait."""
        config = self.config
        shared = self.pool.match(sequence.block_hashes(self._num_shareable(sequence), config.block_size))
        num_needed = self._num_guaranteed(sequence) - sum(map(self.pool.is_used, shared))
        if num_needed > self.pool.num_free - self._num_reserved():
            return False
        self.pool.acquire(shared)
        missing = self.pool.allocate(config.num_blocks_for(sequence.num_tokens) - len(shared))
        sequence.block_table = array("i", shared + missing)
        sequence.num_computed_tokens = len(shared) * config.block_size
        if not sequence.first_scheduled_ns:
            sequence.first_scheduled_ns = self._wall_clock_ns()
            sequence.num_cached_tokens = sequence.num_computed_tokens
        self.running[sequence.id] = sequence
        return True

    def _num_guaranteed(self, sequence: Sequence) -> int:
        """Blocks that must be there before a sequence starts."""
        if self.config.settings.policy is Policy.GUARANTEED_NO_EVICT:
            return self.config.num_blocks_for(sequence.max_num_cached)
        return self.config.num_blocks_for(sequence.num_tokens)

    def _num_reserved(self) -> int:
        """Free blocks that running sequences have been promised; none under `max_utilization`."""
        if self.config.settings.policy is Policy.GUARANTEED_NO_EVICT:
            return sum(self._num_guaranteed(s) - len(s.block_table) for s in self.running.values())
        return 0

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for the known tokens; the last in place gives way. False when that is `sequence` itself.

        Only decoding sequences ever miss a block, and they are planned in order of place: who gives way is not planned.
        """
        num_missing = self.config.num_blocks_for(sequence.num_tokens) - len(sequence.block_table)
        while num_missing > self.pool.num_free:
            victim = max(self.running.values(), key=self._place)
            self._preempt(victim)
            if victim is sequence:
                return False
        if num_missing:
            sequence.block_table.extend(self.pool.allocate(num_missing))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue, at its old place. What it has computed is computed again, or found in the cache."""
        self._release(sequence)
        bisect.insort(self.waiting, sequence, key=self._place)

    def _remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.id]
        if sequence.id in self.running:
            self._release(sequence)
        else:
            del self.waiting[bisect.bisect_left(self.waiting, self._place(sequence), key=self._place)]

    def _release(self, sequence: Sequence) -> None:
        del self.running[sequence.id]
        self.pool.release(sequence.block_table)
        sequence.block_table = array("i")
        sequence.num_computed_tokens = 0

    def _share_full_blocks(self, sequence: Sequence, start: int) -> None:
        """Register the blocks that the chunk from `start` on has filled."""
        size = self.config.block_size
        first, end = start // size, sequence.num_computed_tokens // size
        if first < end and self.config.settings.reuses_blocks:
            hashes = sequence.block_hashes(end, size)
            for index in range(first, end):
                self.pool.register(sequence.block_table[index], hashes[index])


class _Draft:
    """A plan in the making, and how many more tokens it has room for."""

    def __init__(self, max_num_tokens: int) -> None:
        self.chunks: list[Chunk] = []
        self.num_left = max_num_tokens

    def take(self, sequence: Sequence) -> None:
        num_tokens = min(sequence.num_pending, self.num_left)
        self.chunks.append(sequence.chunk(num_tokens))
        self.num_left -= num_tokens
