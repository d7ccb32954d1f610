"""`InflightEngine`: our scheduler and a runner behind the `Engine` protocol.

Threads. The step thread owns the scheduler and the runner and loops inbox -> schedule -> step -> commit -> events.
Consumers run on any number of event loops. The inbox (a lock and a condition) and the outbox (one thread-safe call per
loop and step) connect them. `_lock` guards `_streams`, the inbox, the end of the engine and the scheduler's state for
consumers, `_load`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, aclosing
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from llmserve.core import EVERYBODY, Allowance, GenerateRequest, Tenant, TokenEvent
from llmserve.engine.adapters.pool import AdapterPool
from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.base import BlockRunner, EngineInfo, EngineStats, PipelinedRunner, Runner
from llmserve.engine.begun_step import BegunStep, DoneStep
from llmserve.engine.budgets import TokenBudgets, check_num_answers
from llmserve.engine.draft_engine import DraftEngine
from llmserve.engine.kv_files.block_files import BlockFiles
from llmserve.engine.kv_files.keeper import Fetched, KvKeeper
from llmserve.engine.kv_files.sealed_prefixes import SealedPrefixes
from llmserve.engine.posted import Posted
from llmserve.engine.settings import AdapterLimits
from llmserve.engine.stream import EngineEnd, Outbox, TokenStream
from llmserve.engine.validation import check_request
from llmserve.errors import EngineFileError, InternalError, LlmserveError, ResourceExhausted, Unavailable
from llmserve.scheduler.drafts.drafter import Speculation
from llmserve.scheduler.fairness import has_queue_share
from llmserve.scheduler.plan import StepPlan
from llmserve.scheduler.scheduler import Scheduler, Update
from llmserve.scheduler.sequence import Sequence, sequences_for
from llmserve.scheduler.settings import SchedulerSettings

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0  # a step cannot be interrupted; after this time, the thread is left running


class _Load(NamedTuple):
    """The number of sequences at the step thread's last update."""

    num_waiting: int = 0
    num_running: int = 0
    num_sequences: Mapping[Tenant, int] = MappingProxyType({})  # of each tenant, waiting or running


class InflightEngine:
    """Owns `runner` and closes it. Every stream ends, with its last event or with one error."""

    def __init__(
        self, runner: Runner, info: EngineInfo, settings: SchedulerSettings | None = None,
        budgets: TokenBudgets | None = None, files: BlockFiles | None = None,
        adapter_limits: AdapterLimits | None = None, draft_engine: DraftEngine | None = None,
        prefixes: SealedPrefixes | None = None,
    ) -> None:  # fmt: skip
        """`budgets`: shared with other engines; `files`: files for its blocks; `prefixes`: sealed prefixes."""
        limits, settings = runner.info.fitting, settings or SchedulerSettings()
        if limits.max_seq_len < info.max_seq_len:
            logger.warning(
                "engine %s: a prompt and its answer may have %d tokens, not %d: the KV cache has no room for "
                "more (--kv-cache-fraction, --max-kv-tokens)", info.name, limits.max_seq_len, info.max_seq_len,
            )  # fmt: skip
            info = replace(info, max_seq_len=limits.max_seq_len)
        if isinstance(runner, PipelinedRunner):  # the next step starts before tokens are known
            settings = replace(settings, speculation=Speculation.OFF)
        self._info = info
        self._runner = runner
        self._limits = limits
        self._scheduler = Scheduler(limits.scheduler_config(settings))
        self._draft_engine = draft_engine
        self._scheduler.speculator.model = draft_engine.model if draft_engine else None
        self._pipelined = runner if isinstance(runner, PipelinedRunner) else None
        self._ahead: BegunStep | None = None  # started before the tokens of the previous step were known
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._ids = itertools.count()
        self._streams: dict[int, TokenStream] = {}  # by sequence id
        self._arriving: list[Sequence] = []
        self._held: set[Sequence] = set()  # until the scheduler gets them: files are searched for their prompts
        self._fetched: list[Fetched] = []
        self._leaving: dict[int, Tenant] = {}
        self._posted = Posted()
        self._adapters = AdapterPool(runner, self._post, base_digest=info.digest, limits=adapter_limits)
        self._outbox = Outbox()
        self._end = EngineEnd()
        self._budgets = budgets or TokenBudgets()
        self._load = _Load()
        self._num_steps = 0
        self._num_ctx_tokens = 0
        self._keeper: KvKeeper | None = None
        keeps_blocks = not limits.needs_whole and self._pipelined is None
        if files is not None and keeps_blocks and isinstance(runner, BlockRunner):
            self._keeper = KvKeeper(files, runner, self._scheduler, self._come_back, self._post, self._streams)
        if prefixes is not None and isinstance(runner, BlockRunner):
            prefixes.fill(self._scheduler, runner)
        self._stats = self._snapshot(StepPlan(()))
        self._thread = threading.Thread(target=self._run, name=f"llmserve-engine-{info.name}", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        return self._info

    def submit(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """See `Engine.submit`. A request whose answer can never fit also raises `InvalidArgument`."""
        self._end.check()
        limits = self._limits
        check_request(
            request, vocab_size=limits.vocab_size, max_seq_len=limits.max_seq_len, pools=limits.output_width > 0,
            adapters=self._adapters.digests,
        )  # fmt: skip
        self._scheduler.config.check_fits(request.num_sequences)
        return self._adapted(request) if request.adapter else self._stream(request)

    def add_adapter(self, adapter: SealedAdapter) -> None:
        """See `AdapterEngine`."""
        self._adapters.add(adapter)

    def remove_adapter(self, digest: str) -> None:
        self._adapters.remove(digest)

    def stats(self) -> EngineStats:
        """Returns the statistics of the last step."""
        return self._stats

    def allowance(self, tenant: Tenant) -> Allowance:
        """See `MeteringEngine`."""
        with self._lock:
            num_answers = self._num_sequences()[tenant] if tenant.max_answers else 0
        return self._budgets.allowance(tenant, num_answers)

    def healthy(self) -> bool:
        return self._end.reason is None

    def close(self) -> None:
        """Stop the step loop; open streams end with `Unavailable`. Waits for the running step. May be called again."""
        self._shut(Unavailable("the engine has been closed"))
        self._thread.join(CLOSE_TIMEOUT_S)

    async def _adapted(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """Keeps the adapter loaded until the sequences have ended."""
        async with (
            self._adapters.held(request.adapter) as slot,
            aclosing(self._stream(request, slot)) as events,
        ):
            async for event in events:
                yield event

    async def _stream(self, request: GenerateRequest, adapter: int = 0) -> AsyncGenerator[TokenEvent, None]:
        limit, arrival_ns = self._limits.max_seq_len, time.time_ns()
        sequences = sequences_for(request, self._ids, max_seq_len=limit, arrival_ns=arrival_ns, adapter=adapter)
        stream = TokenStream(asyncio.get_running_loop(), len(sequences))
        self._enqueue(request, sequences, stream)
        is_metered = request.tenant.tokens_per_minute > 0
        try:
            while stream.num_open:
                event = await stream.get()
                if is_metered:
                    self._budgets.charge(request.tenant, len(event.token_ids))
                yield event
        finally:
            self._leave(sequences)

    def _enqueue(self, request: GenerateRequest, sequences: list[Sequence], stream: TokenStream) -> None:
        """A refused request costs its tenant nothing."""
        with self._lock:
            self._end.check()
            self._check_tenant(sequences)
            self._check_room(sequences)
            if request.tenant.tokens_per_minute:
                self._budgets.charge(request.tenant, len(request.prompt_ids))
            self._arriving += sequences
            self._streams.update((sequence.id, stream) for sequence in sequences)
            self._wake.notify()

    def _check_tenant(self, sequences: list[Sequence]) -> None:
        """Check the tenant's limits."""
        tenant = sequences[0].tenant
        if tenant.max_answers:
            check_num_answers(tenant, self._num_sequences()[tenant], len(sequences))
        if tenant.tokens_per_minute:
            self._budgets.check(tenant)

    def _num_sequences(self) -> Counter[Tenant]:
        here = Counter(self._load.num_sequences) + Counter(one.tenant for one in (*self._arriving, *self._held))
        return here - Counter(self._leaving.values())

    def _check_room(self, sequences: list[Sequence]) -> None:
        load, config = self._load, self._scheduler.config
        num_waiting = load.num_waiting + len(self._arriving) + len(self._held)
        try:
            config.check_room(len(sequences), num_waiting=num_waiting, num_running=load.num_running)
        except ResourceExhausted:
            if not has_queue_share(sequences[0].tenant, len(sequences), self._num_sequences(), config):
                raise

    def _leave(self, sequences: list[Sequence]) -> None:
        """The consumer has gone. Its running sequences (so the step thread is awake) are freed before the next step."""
        with self._lock:
            self._leaving |= {one.id: one.tenant for one in sequences if self._streams.pop(one.id, None)}

    def _shut(self, error: LlmserveError) -> None:
        """End every open stream with `error`, and accept no more requests."""
        with self._lock:
            outbox = self._end.say(error, self._streams.values())
            self._streams.clear()
            self._wake.notify()
        outbox.flush()

    def _run(self) -> None:
        """The step thread."""
        is_sound = False
        try:
            while self._take_inbox():
                self._step()
            is_sound = True
        except Exception as error:  # the border: every open stream gets the error
            logger.exception("the step loop of engine %s failed", self._info.name)
            is_lost = isinstance(error, Unavailable | EngineFileError)  # the device or the file, and no fault of ours
            failure = Unavailable if is_lost else InternalError
            self._shut(failure(f"the engine failed while computing a step: {error!r}"))
        finally:
            with self._lock:
                self._posted.take().refuse()
            with ExitStack() as closing:  # closes all of them, the last one first, even if some fail
                if self._draft_engine:
                    closing.callback(self._draft_engine.close)
                closing.callback(self._runner.close)
                if self._keeper is not None:
                    closing.callback(self._keeper.close, saves=is_sound)

    def _take_inbox(self) -> bool:
        """Sleep until there is work, then pass on new and ended sequences. False: the engine is closed."""
        scheduler = self._scheduler
        if not (self._has_mail or scheduler.has_work):
            scheduler.check_integrity()  # takes a while, in which consumers can get the lock
        with self._lock:
            while not (self._end.reason or self._has_mail or scheduler.has_work):
                self._wake.wait()
            fetched, ready, self._fetched, self._arriving = self._fetched, self._arriving, [], []
            self._held |= {*ready}
        if self._keeper is not None:
            ready = self._looked_for(ready, fetched, self._keeper)
        with self._lock:
            for sequence in ready:
                if sequence.id in self._streams:
                    scheduler.add(sequence)
            for sequence_id in self._leaving:
                scheduler.cancel(sequence_id)
            self._held = {one for one in self._held.difference(ready) if one.id in self._streams}
            self._arriving = [one for one in self._arriving if one.id in self._streams]  # the others follow next time
            self._leaving.clear()
            self._publish_load()
            posted, goes_on = self._posted.take(), self._end.reason is None
        posted.run()
        return goes_on

    @property
    def _has_mail(self) -> bool:
        return bool(self._arriving or self._leaving or self._fetched or self._posted)

    def _post(self, task: Callable[[], None]) -> Future[None]:
        """Queue work to be done between two steps, after ended sequences have been removed."""
        with self._lock:
            done = self._posted.add(task)
            if self._end.reason is not None:
                self._posted.take().refuse()
            self._wake.notify()
        return done

    def _looked_for(self, arriving: list[Sequence], fetched: list[Fetched], keeper: KvKeeper) -> list[Sequence]:
        """Sequences without blocks in files, or with no more than what was read."""
        ready: list[Sequence] = []
        for found in fetched:
            if found.sequences[0].id in self._streams:
                keeper.restore(found)
            ready += found.sequences
        for _, group in itertools.groupby(arriving, key=lambda sequence: id(sequence.request)):
            sequences = list(group)
            if not keeper.fetch(sequences):
                ready += sequences
        return ready

    def _come_back(self, fetched: Fetched) -> None:
        with self._lock:
            self._fetched.append(fetched)
            self._wake.notify()

    def _step(self) -> None:
        updates = self._scheduler.expire()
        step, self._ahead = self._ahead, None
        plan = self._scheduler.schedule() if step is None else None
        started = time.perf_counter()  # time that a draft engine used during planning is counted separately
        if plan is not None:
            step = self._begun(plan)
        if step is not None:
            updates += self._finish(step)
        else:
            assert not self._scheduler.has_work, "sequences wait, but none can run"
        self._stats = self._snapshot(step.plan if step else StepPlan(()))
        self._publish(updates)
        if step is not None and not self._pipelined:  # verifying a draft has a cost, too
            self._scheduler.speculator.observe(step.plan, time.perf_counter() - started)

    def _begun(self, plan: StepPlan) -> BegunStep:
        if self._pipelined:
            return BegunStep(plan, self._pipelined.launch(plan))
        if self._keeper is not None:
            self._keeper.keep()
        result = self._runner.step(plan)
        self._scheduler.speculator.keep(plan, result.hidden, self._scheduler.running)
        return BegunStep(plan, DoneStep(result))

    def _finish(self, step: BegunStep) -> list[Update]:
        """If the runner supports it, the next step starts before this one's tokens are waited for."""
        scheduler, plan = self._scheduler, step.plan
        if self._pipelined and (following := scheduler.foresee(plan)) is not None:
            self._ahead = self._begun(following)
        result = step.pending.result()
        self._num_steps += 1
        updates = scheduler.commit(plan, result.tokens, result.log_probs, result.scores)
        if self._ahead is not None and not scheduler.has_work:
            self._ahead.pending.result()  # without a consumer
            self._ahead = None
        return updates

    def _publish(self, updates: list[Update]) -> None:
        with self._lock:
            self._publish_load()
            for sequence_id, event in updates:
                if (stream := self._streams.get(sequence_id)) is not None:  # else its consumer left while the step ran
                    self._outbox.put(stream, event)
                if event.finish_reason is not None:
                    self._streams.pop(sequence_id, None)
                    self._leaving.pop(sequence_id, None)
        closed = self._outbox.flush()
        if closed:
            self._leave_loops(closed)

    def _publish_load(self) -> None:
        """Called by the step thread with the lock held, so that consumers do not count sequences while they move."""
        scheduler = self._scheduler
        self._load = _Load(len(scheduler.waiting), len(scheduler.running), scheduler.num_sequences)

    def _leave_loops(self, closed: list[asyncio.AbstractEventLoop]) -> None:
        """Cancel the sequences of consumers whose loop has closed."""
        with self._lock:
            gone = [sequence_id for sequence_id, stream in self._streams.items() if stream.loop in closed]
            for sequence_id in gone:
                del self._streams[sequence_id]
            self._leaving |= dict.fromkeys(gone, EVERYBODY)

    def _snapshot(self, plan: StepPlan) -> EngineStats:
        scheduler, pool = self._scheduler, self._scheduler.pool
        context = [chunk for chunk in plan.chunks if chunk.is_context]
        num_ctx_tokens = sum(len(chunk.token_ids) for chunk in context)
        self._num_ctx_tokens += num_ctx_tokens
        max_num_blocks, num_free = (self._limits.num_whole(count) for count in (pool.num_blocks, pool.num_free))
        return EngineStats(
            iteration=self._num_steps,
            num_waiting_requests=len(scheduler.waiting),
            num_active_requests=len(scheduler.waiting) + len(scheduler.running),
            max_num_active_requests=scheduler.config.max_num_running,
            num_scheduled_requests=len(plan.chunks),
            num_context_requests=len(context),
            num_gen_requests=len(plan.chunks) - len(context),
            num_paused_requests=scheduler.num_paused,
            num_ctx_tokens=num_ctx_tokens,
            tokens_per_block=self._limits.block_size,
            max_num_blocks=max_num_blocks,
            free_num_blocks=num_free,
            used_num_blocks=max_num_blocks - num_free,
            reused_blocks=pool.num_reused,
            missed_blocks=pool.num_missed,
            gpu_mem_usage=self._limits.gpu_bytes,
            pinned_mem_usage=self._limits.pinned_bytes,
            total_ctx_tokens=self._num_ctx_tokens,
            total_gen_tokens=scheduler.num_generated + scheduler.speculator.num_generated,
            total_drafted_tokens=scheduler.speculator.num_drafted,
            total_accepted_tokens=scheduler.speculator.num_accepted,
            total_stored_blocks=self._keeper.num_stored if self._keeper else None,
            total_restored_blocks=self._keeper.num_restored if self._keeper else None,
            max_num_states=scheduler.config.num_states,
            free_num_states=scheduler.states.num_free,
            promised_bytes=self._limits.promised_bytes(pool.num_free, scheduler.states.num_free)
            + (self._draft_engine.promised_bytes if self._draft_engine else 0),
            total_preemptions=scheduler.num_preemptions,
        )
