"""Runs the batches that schedulers have chosen on instances.

An instance runs one batch at a time. It is idle again when all streams of the batch have ended, or when a
`ReleasingInstance` says so. An instance with a queue of its own gets batches ahead if waiting has no advantage: it is
the only instance, and no batch would grow meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from functools import partial

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import InternalError
from llmserve.serving.backend import Execution, ModelInstance, QueueingInstance, ReleasingInstance
from llmserve.serving.instruments.model_statistics import ModelStatistics
from llmserve.serving.schedulers.queued_request import QueuedRequest
from llmserve.serving.schedulers.rate_limiter import Claim
from llmserve.serving.schedulers.shared import SharedResources
from llmserve.serving.types import InferRequest, InferResponse

logger = logging.getLogger(__name__)


class RunningBatch:
    """Requests that were started together on one instance."""

    __slots__ = ("_instance", "input_ns", "num_running", "queued_requests", "size", "start_ns")

    def __init__(self, instance: ScheduledInstance, queued_requests: Sequence[QueuedRequest], num_running: int) -> None:
        self._instance = instance
        self.queued_requests = queued_requests
        self.size = sum([queued.batch_size for queued in queued_requests])
        self.start_ns = time.monotonic_ns()
        self.input_ns = 0
        self.num_running = num_running

    def stream_ended(self) -> None:
        self.num_running -= 1
        if self.num_running == 0:
            self._instance.batch_ended(self)


class ScheduledInstance:
    def __init__(
        self,
        instance: ModelInstance,
        statistics: ModelStatistics,
        on_idle: Callable[[], None],
        *,
        runs_ahead: bool = False,
    ) -> None:
        """`on_idle` is called when it may be taken again. `runs_ahead`: fill the queue of an instance that has one."""
        self.claim: Claim | None = None  # the rate limiter's permission to run; None: not limited
        self._instance = instance
        self._releasing = instance if isinstance(instance, ReleasingInstance) else None
        self._statistics = statistics
        self._on_idle = on_idle
        self._queueing = instance if runs_ahead and isinstance(instance, QueueingInstance) else None
        self._num_held = 0  # batches that the instance has
        self._unread: set[asyncio.Task[None]] = set()  # read streams that have no client

    @property
    def is_idle(self) -> bool:
        """Whether the instance can take a batch."""
        return not self._num_held or (self._queueing is not None and self._num_held < self._queueing.room)

    def healthy(self) -> bool:
        return self._instance.healthy()

    def take(self) -> bool:
        """Occupy the instance. If it returns False, `on_idle` is called when the instance can be taken."""
        if not self.is_idle or (self.claim is not None and not self.claim.take()):
            return False
        self._num_held += 1
        return True

    def give_back(self) -> None:
        """Free the instance after `take`, because there was nothing to run."""
        self._free(has_run=False)

    def decline(self) -> None:
        """There is nothing to run: return the rate limiter's grant, for other instances."""
        if self.claim is not None and self.claim.granted and self.is_idle:
            self.claim.give_back(has_run=False)

    def leave(self) -> None:
        """No more batches will run."""
        self.decline()
        if self.claim is not None:
            self.claim.leave()

    def run(
        self,
        queued_requests: Sequence[QueuedRequest],
        requests: Sequence[InferRequest],
        places: Sequence[int] | None = None,
    ) -> None:
        """Execute `requests` on the instance, which has been taken.

        `queued_requests[i]` gets the answer to `requests[places[i]]`, or without `places` to `requests[i]`. Answers to
        other requests are read and dropped.
        """
        batch = RunningBatch(self, queued_requests, len(requests))
        try:
            streams = self._execute(requests)
        except Exception as error:  # border: a backend's exception is these requests' answer
            for queued in queued_requests:
                queued.fail(error)
            self.give_back()  # without `on_idle`: the caller continues itself
            return
        batch.input_ns = time.monotonic_ns() - batch.start_ns
        if places is not None:
            owned = frozenset(places)
            for place, stream in enumerate(streams):
                if place not in owned:
                    self._read_unowned(stream, batch)
            streams = [streams[place] for place in places]
        for queued, stream in zip(queued_requests, streams, strict=True):
            queued.timing.queue_ns += batch.start_ns - queued.arrival_ns
            queued.timing.input_ns += batch.input_ns
            queued.start(stream, batch)
        if self._releasing is not None:
            self._releasing.when_released(partial(self._end, batch))

    def batch_ended(self, batch: RunningBatch) -> None:
        """All streams of the batch have ended."""
        if self._releasing is None:
            self._end(batch, None)

    def _execute(self, requests: Sequence[InferRequest]) -> Sequence[AsyncGenerator[InferResponse, None]]:
        streams = self._instance.execute(requests)
        if len(streams) != len(requests):
            raise InternalError(
                f"model instance '{self._instance.name}' returned {len(streams)} streams for {len(requests)} requests"
            )
        return streams

    def _read_unowned(self, stream: AsyncGenerator[InferResponse, None], batch: RunningBatch) -> None:
        task = asyncio.ensure_future(_read(stream, batch))
        self._unread.add(task)
        task.add_done_callback(self._unread.discard)

    def _end(self, batch: RunningBatch, execution: Execution | None) -> None:
        given_ns = batch.start_ns + batch.input_ns
        began_ns, ended_ns = execution or (given_ns, time.monotonic_ns())
        given_ns = min(given_ns, began_ns)  # the instance's thread may begin before `execute` returns
        self._statistics.batch_executed(batch.size, input_ns=batch.input_ns, infer_ns=ended_ns - began_ns)
        for queued in batch.queued_requests:  # time in the instance's queue is not the model's time
            queued.timing.queue_ns += began_ns - given_ns
            queued.timing.infer_ns -= began_ns - given_ns
        self._free(has_run=True)
        self._on_idle()

    def _free(self, *, has_run: bool) -> None:
        self._num_held -= 1
        if self.claim is not None:
            self.claim.give_back(has_run=has_run)


async def _read(stream: AsyncGenerator[InferResponse, None], batch: RunningBatch) -> None:
    try:
        async with aclosing(stream):
            async for response in stream:
                if response.final:
                    return
    except Exception:  # border: nobody waits for this answer
        logger.warning("a request that fills a batch failed", exc_info=True)
    finally:
        batch.stream_ended()


def usable(instances: Collection[ScheduledInstance]) -> Collection[ScheduledInstance]:
    """The instances that work; all of them if none does, so that requests get the reason."""
    return [instance for instance in instances if instance.healthy()] or instances


def schedule_instances(
    config: ModelConfig,
    instances: Sequence[ModelInstance],
    statistics: ModelStatistics,
    shared: SharedResources,
    on_idle: Callable[[], None],
) -> list[ScheduledInstance]:
    """The instances, each with a claim for its group if the server limits rates."""
    groups = {f"{group.name}_{index}": group for group in config.instance_group for index in range(group.count)}
    scheduled = []
    batches = config.HasField("dynamic_batching") or config.HasField("sequence_batching")
    runs_ahead = len(instances) == 1 and not batches and shared.rate_limiter is None
    for instance in instances:
        one = ScheduledInstance(instance, statistics, on_idle, runs_ahead=runs_ahead)
        if shared.rate_limiter is not None and instance.name in groups:
            one.claim = shared.rate_limiter.join(groups[instance.name], on_idle)
        scheduled.append(one)
    return scheduled
