"""The scheduler of models that take one batch at a time per instance: direct (batches of one request) and dynamic.

Everything happens on the event loop, in `_pump`: whenever a request comes, an instance is released or a delay is over,
idle instances get the batches that are due. A request that is cancelled while it waits never runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.serving.backend import ModelInstance
from llmserve.serving.schedulers.base import Rejected
from llmserve.serving.schedulers.batching import BatchRule, batch_key
from llmserve.serving.schedulers.lanes import Lane, make_lanes
from llmserve.serving.schedulers.queue import QueuePolicies, RequestQueue
from llmserve.serving.schedulers.shared import NOTHING_SHARED, SharedResources
from llmserve.serving.schedulers.tickets import Ticket, read_ticket
from llmserve.serving.signature import ModelSignature, request_label
from llmserve.serving.statistics import ModelStatistics, RequestTiming
from llmserve.serving.types import InferRequest, InferResponse


class QueuedScheduler:
    def __init__(
        self,
        config: ModelConfig,
        signature: ModelSignature,
        instances: Sequence[ModelInstance],
        statistics: ModelStatistics,
        shared: SharedResources = NOTHING_SHARED,
    ) -> None:
        batching = config.dynamic_batching
        self._rule = BatchRule.from_config(config)
        self._batches = config.HasField("dynamic_batching")
        self._policies = QueuePolicies.from_config(batching)
        self._preserves_ordering = batching.preserve_ordering
        self._signature = signature
        self._lanes = make_lanes(config, instances, statistics, shared, self._pump)  # the next one first
        self._is_limited = shared.rate_limiter is not None
        self._queue = RequestQueue(self._policies.num_levels)
        self._last_finished: asyncio.Future[None] | None = None
        self._delay_timer: asyncio.TimerHandle | None = None
        self._stopped = False

    @property
    def num_pending(self) -> int:
        return len(self._queue)

    def infer(self, request: InferRequest, timing: RequestTiming) -> AsyncGenerator[InferResponse, None]:
        return read_ticket(lambda: self._admit(request, timing), self._finish)

    async def stop(self) -> None:
        self._stopped = True
        for ticket in list(self._queue):
            self._refuse(ticket, f"model '{ticket.request.model_name}' is being unloaded")
        for lane in self._lanes:
            lane.leave()

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
        self._pump()
        return ticket

    def _pump(self) -> None:
        """Give idle instances what is due, and come back when more will be."""
        if self._delay_timer is not None:
            self._delay_timer.cancel()
            self._delay_timer = None
        while self._queue.num_waiting and self._has_idle_lane():
            now_ns = time.monotonic_ns()
            tickets, wait_until_ns = self._rule.choose(self._queue, now_ns)
            if not tickets:
                delay_s = (wait_until_ns - now_ns) / 1e9
                self._delay_timer = asyncio.get_running_loop().call_later(delay_s, self._pump)
                break
            if not self._run(tickets):
                return
        if self._is_limited:
            for lane in self._lanes:
                lane.decline()

    def _run(self, tickets: list[Ticket]) -> bool:
        """Start a batch; False while no instance may."""
        lane = self._take_lane()
        if lane is None:
            return False
        for ticket in tickets:
            self._queue.discard(ticket)
            if ticket.timer is not None:
                ticket.timer.cancel()
        alive = [ticket for ticket in tickets if not ticket.cancelled]
        if alive:
            lane.run(alive, [ticket.request for ticket in alive])
        else:
            lane.give_back()
        return True

    def _has_idle_lane(self) -> bool:
        for lane in self._lanes:  # noqa: SIM110 - runs for every request: a generator would take twice as long
            if lane.is_idle:
                return True
        return False

    def _take_lane(self) -> Lane | None:
        """The instance that works and has rested longest; when none works, any, so that requests learn why."""
        for lane in self._lanes:
            if lane.is_idle and lane.healthy() and lane.take():
                self._lanes.remove(lane)
                self._lanes.append(lane)
                return lane
        if any(lane.healthy() for lane in self._lanes):
            return None
        return next((lane for lane in self._lanes if lane.take()), None)

    def _finish(self, ticket: Ticket) -> None:
        """The request is over for the scheduler: answered, cancelled or refused."""
        self._queue.discard(ticket)
        if ticket.timer is not None:
            ticket.timer.cancel()
        ticket.end_turn()
        ticket.leave_batch()

    def _expire(self, ticket: Ticket, delays: bool) -> None:
        if delays:
            self._queue.delay(ticket)
        else:
            self._refuse(ticket, "Request timeout expired")

    def _refuse(self, ticket: Ticket, problem: str) -> None:
        self._queue.discard(ticket)
        ticket.refuse(problem)
