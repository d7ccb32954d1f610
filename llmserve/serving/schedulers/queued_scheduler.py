"""The scheduler of models that take one batch at a time per instance: direct (batches of one request) and dynamic.

Everything happens on the event loop, in `_pump`: whenever a request arrives, an instance is released or a delay is
over, idle instances get the batches that are due. A request that is cancelled while it waits never runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.serving.backend import ModelInstance
from llmserve.serving.instruments.model_statistics import ModelStatistics, RequestTiming
from llmserve.serving.schedulers.base import Rejected
from llmserve.serving.schedulers.batching import BatchRule, batch_key
from llmserve.serving.schedulers.instances import ScheduledInstance, schedule_instances
from llmserve.serving.schedulers.queued_request import QueuedRequest, answer_queued
from llmserve.serving.schedulers.request_queue import QueuePolicies, RequestQueue
from llmserve.serving.schedulers.shared import NOTHING_SHARED, SharedResources
from llmserve.serving.signature import ModelSignature, request_label
from llmserve.serving.types import InferRequest, InferResponse

LOOK_AGAIN_S = 0.25  # between checks of broken instances, which do not report when they work again


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
        self._instances = schedule_instances(config, instances, statistics, shared, self._pump)  # the next one first
        self._is_limited = shared.rate_limiter is not None
        self._queue = RequestQueue()
        self._last_finished: asyncio.Future[None] | None = None
        self._delay_timer: asyncio.TimerHandle | None = None
        self._stopped = False

    @property
    def num_pending(self) -> int:
        return len(self._queue)

    def infer(self, request: InferRequest, timing: RequestTiming) -> AsyncGenerator[InferResponse, None]:
        return answer_queued(lambda: self._admit(request, timing), self._finish)

    async def stop(self) -> None:
        self._stopped = True
        for queued in list(self._queue):
            self._refuse(queued, f"model '{queued.request.model_name}' is being unloaded")
        for instance in self._instances:
            instance.leave()

    def _admit(self, request: InferRequest, timing: RequestTiming) -> QueuedRequest:
        level = self._policies.level_of(request)
        policy = self._policies.policy(level)
        if self._stopped:
            raise Rejected(f"{request_label(request)}model '{request.model_name}' is being unloaded")
        if policy.max_size and self._queue.size(level) >= policy.max_size:
            raise Rejected(f"{request_label(request)}Exceeds maximum queue size")
        size = self._signature.batch_size(request)
        key = batch_key(self._signature, request) if self._batches else ()
        queued = QueuedRequest(request, timing, level, size, key, time.monotonic_ns())
        if timeout_us := policy.timeout_of(request):
            loop = asyncio.get_running_loop()
            queued.timer = loop.call_later(timeout_us / 1e6, self._expire, queued, policy.delays)
        if self._preserves_ordering:
            queued.previous = self._last_finished
            queued.finished = self._last_finished = asyncio.get_running_loop().create_future()
        self._queue.put(queued)
        self._pump()
        return queued

    def _pump(self) -> None:
        """Give idle instances the batches that are due, and set a timer for later ones."""
        if self._delay_timer is not None:
            self._delay_timer.cancel()
            self._delay_timer = None
        while self._queue.num_waiting and self._has_idle_instance():
            now_ns = time.monotonic_ns()
            queued_requests, wait_until_ns = self._rule.choose(self._queue, now_ns)
            if not queued_requests:
                delay_s = (wait_until_ns - now_ns) / 1e9
                self._delay_timer = asyncio.get_running_loop().call_later(delay_s, self._pump)
                break
            if not self._run(queued_requests):
                if any(instance.is_idle and not instance.healthy() for instance in self._instances):
                    self._delay_timer = asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._pump)
                return
        if self._is_limited:
            for instance in self._instances:
                instance.decline()

    def _run(self, queued_requests: list[QueuedRequest]) -> bool:
        """Start a batch. Returns False if no instance may run it now."""
        instance = self._take_instance()
        if instance is None:
            return False
        for queued in queued_requests:
            self._queue.discard(queued)
            if queued.timer is not None:
                queued.timer.cancel()
        alive = [queued for queued in queued_requests if not queued.cancelled]
        if alive:
            instance.run(alive, [queued.request for queued in alive])
        else:
            instance.give_back()
        return True

    def _has_idle_instance(self) -> bool:
        for instance in self._instances:  # noqa: SIM110 - runs for every request: a generator would take twice as long
            if instance.is_idle:
                return True
        return False

    def _take_instance(self) -> ScheduledInstance | None:
        """Take the working instance that was used least recently; if none works, any: requests then get the reason."""
        for instance in self._instances:
            if instance.is_idle and instance.healthy() and instance.take():
                self._instances.remove(instance)
                self._instances.append(instance)
                return instance
        if any(instance.healthy() for instance in self._instances):
            for instance in self._instances:
                if not instance.healthy():
                    instance.decline()
            return None
        return next((instance for instance in self._instances if instance.take()), None)

    def _finish(self, queued: QueuedRequest) -> None:
        """The request is over for the scheduler: answered, cancelled or refused."""
        self._queue.discard(queued)
        if queued.timer is not None:
            queued.timer.cancel()
        queued.end_turn()
        queued.leave_batch()

    def _expire(self, queued: QueuedRequest, delays: bool) -> None:
        if delays:
            self._queue.delay(queued)
        else:
            self._refuse(queued, "Request timeout expired")
        self._pump()  # without it, the others may have a preferred size

    def _refuse(self, queued: QueuedRequest, problem: str) -> None:
        self._queue.discard(queued)
        queued.refuse(problem)
