"""The scheduler of models that take one batch at a time per instance: direct (batches of one request) and dynamic.

Everything happens on the event loop, in `_pump`: whenever a request comes, an instance is released or a delay is over,
idle instances get the batches that are due. A request that is cancelled while it waits never runs.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.serving.backend import ModelInstance, ReleasingInstance
from llmserve.serving.schedulers.base import Rejected, timed_next
from llmserve.serving.schedulers.batching import BatchRule, batch_key
from llmserve.serving.schedulers.queue import QueuePolicies, RequestQueue, Ticket
from llmserve.serving.signature import ModelSignature, request_label
from llmserve.serving.statistics import ModelStatistics, RequestTiming
from llmserve.serving.types import InferRequest, InferResponse


@dataclass(frozen=True, slots=True, eq=False)
class _Lane:
    instance: ModelInstance
    releasing: ReleasingInstance | None  # the same instance, if it says itself when it is free


@dataclass(slots=True, eq=False)
class _Batch:
    lane: _Lane
    size: int
    start_ns: int
    input_ns: int = 0
    num_running: int = 0


class QueuedScheduler:
    def __init__(
        self,
        config: ModelConfig,
        signature: ModelSignature,
        instances: Sequence[ModelInstance],
        statistics: ModelStatistics,
    ) -> None:
        batching = config.dynamic_batching
        self._rule = BatchRule.from_config(config)
        self._batches = config.HasField("dynamic_batching")
        self._policies = QueuePolicies.from_config(batching)
        self._preserves_ordering = batching.preserve_ordering
        self._signature = signature
        self._statistics = statistics
        self._idle = deque(
            _Lane(instance, instance if isinstance(instance, ReleasingInstance) else None) for instance in instances
        )
        self._queue = RequestQueue(self._policies.num_levels)
        self._running: dict[Ticket, _Batch] = {}
        self._last_finished: asyncio.Future[None] | None = None
        self._delay_timer: asyncio.TimerHandle | None = None
        self._stopped = False

    @property
    def num_pending(self) -> int:
        return len(self._queue)

    async def infer(self, request: InferRequest, timing: RequestTiming) -> AsyncGenerator[InferResponse, None]:
        ticket = self._admit(request, timing)
        try:
            self._pump()
            if ticket.stream is None and ticket.error is None:
                ticket.dispatched = asyncio.get_running_loop().create_future()
                await ticket.dispatched
            if ticket.previous is not None and not ticket.previous.done():
                await asyncio.shield(ticket.previous)
            if ticket.error is not None:
                raise ticket.error
            assert ticket.stream is not None
            while (response := await timed_next(ticket.stream, timing)) is not None:
                if response.final:
                    self._finish(ticket)  # the instance is free before the client has taken the answer
                yield response
        finally:
            self._finish(ticket)
            if ticket.stream is not None:
                await ticket.stream.aclose()

    async def stop(self) -> None:
        self._stopped = True
        for ticket in list(self._queue):
            self._refuse(ticket, f"model '{ticket.request.model_name}' is being unloaded")

    def _admit(self, request: InferRequest, timing: RequestTiming) -> Ticket:
        level = self._policies.level_of(request)
        policy = self._policies.policy(level)
        if self._stopped:
            raise Rejected(f"{request_label(request)}model '{request.model_name}' is being unloaded")
        if policy.max_size and self._queue.size(level) >= policy.max_size:
            raise Rejected(f"{request_label(request)}Exceeds maximum queue size")
        size = self._signature.batch_size(request)
        key = batch_key(self._signature, request) if self._batches else ()
        ticket = Ticket(request, timing, level, size, key, time.monotonic_ns())
        if timeout_us := policy.timeout_of(request):
            loop = asyncio.get_running_loop()
            ticket.timer = loop.call_later(timeout_us / 1e6, self._expire, ticket, policy.delays)
        if self._preserves_ordering:
            ticket.previous = self._last_finished
            ticket.finished = self._last_finished = asyncio.get_running_loop().create_future()
        self._queue.put(ticket)
        return ticket

    def _pump(self) -> None:
        """Give idle instances what is due, and come back when more will be."""
        if self._delay_timer is not None:
            self._delay_timer.cancel()
            self._delay_timer = None
        while self._idle:
            now_ns = time.monotonic_ns()
            tickets, wait_until_ns = self._rule.choose(self._queue, now_ns)
            if not tickets:
                if wait_until_ns:
                    delay_s = (wait_until_ns - now_ns) / 1e9
                    self._delay_timer = asyncio.get_running_loop().call_later(delay_s, self._pump)
                return
            for ticket in tickets:
                self._queue.discard(ticket)
                if ticket.timer is not None:
                    ticket.timer.cancel()
            alive = [ticket for ticket in tickets if ticket.dispatched is None or not ticket.dispatched.cancelled()]
            if alive:
                self._dispatch(alive, now_ns)

    def _dispatch(self, tickets: list[Ticket], now_ns: int) -> None:
        lane = self._idle.popleft()
        batch = _Batch(lane, sum(ticket.batch_size for ticket in tickets), now_ns, num_running=len(tickets))
        try:
            streams = lane.instance.execute([ticket.request for ticket in tickets])
        except Exception as error:  # border: the backend's fault is these requests' answer
            self._idle.append(lane)
            for ticket in tickets:
                ticket.error = error
                _wake(ticket)
            return
        batch.input_ns = time.monotonic_ns() - now_ns
        for ticket, stream in zip(tickets, streams, strict=True):
            self._running[ticket] = batch
            ticket.stream = stream
            ticket.timing.queue_ns += now_ns - ticket.arrival_ns
            ticket.timing.input_ns += batch.input_ns
            _wake(ticket)
        if lane.releasing is not None:
            lane.releasing.when_released(partial(self._release, batch))

    def _finish(self, ticket: Ticket) -> None:
        """The request is over for the scheduler: answered, cancelled or refused. May be called again."""
        self._queue.discard(ticket)
        if ticket.timer is not None:
            ticket.timer.cancel()
        if ticket.finished is not None and not ticket.finished.done():
            ticket.finished.set_result(None)
        batch = self._running.pop(ticket, None)
        if batch is None:
            return
        batch.num_running -= 1
        if batch.num_running == 0 and batch.lane.releasing is None:
            self._release(batch)

    def _release(self, batch: _Batch) -> None:
        infer_ns = time.monotonic_ns() - batch.start_ns - batch.input_ns
        self._statistics.batch_executed(batch.size, input_ns=batch.input_ns, infer_ns=infer_ns)
        self._idle.append(batch.lane)
        self._pump()

    def _expire(self, ticket: Ticket, delays: bool) -> None:
        if delays:
            self._queue.delay(ticket)
        else:
            self._refuse(ticket, "Request timeout expired")

    def _refuse(self, ticket: Ticket, problem: str) -> None:
        self._queue.discard(ticket)
        ticket.error = Rejected(request_label(ticket.request) + problem)
        _wake(ticket)


def _wake(ticket: Ticket) -> None:
    if ticket.dispatched is not None and not ticket.dispatched.done():
        ticket.dispatched.set_result(None)
