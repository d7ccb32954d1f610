"""The scheduler for backends that do their own batching: a request goes directly to the least busy instance."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from llmserve.serving.backend import ModelInstance
from llmserve.serving.instruments.model_statistics import ModelStatistics, RequestTiming
from llmserve.serving.schedulers.base import Rejected
from llmserve.serving.types import InferRequest, InferResponse


@dataclass(slots=True)
class _CountedInstance:
    instance: ModelInstance
    num_running: int = 0


class PassThroughScheduler:
    def __init__(
        self,
        instances: Sequence[ModelInstance],
        statistics: ModelStatistics,
        batch_size: Callable[[InferRequest], int],
    ) -> None:
        self._instances = [_CountedInstance(instance) for instance in instances]
        self._statistics = statistics
        self._batch_size = batch_size
        self._stopped = False

    @property
    def num_pending(self) -> int:
        return 0

    async def infer(self, request: InferRequest, timing: RequestTiming) -> AsyncGenerator[InferResponse, None]:
        if self._stopped:
            raise Rejected(f"model '{request.model_name}' is being unloaded")
        counted = min(self._instances, key=lambda counted: counted.num_running)
        counted.num_running += 1
        has_answered = has_failed = False
        try:
            (stream,) = counted.instance.execute((request,))
            async with aclosing(stream):
                start_ns = time.monotonic_ns()
                try:
                    async for response in stream:  # waiting is the model's time; the reader's time is not
                        timing.infer_ns += time.monotonic_ns() - start_ns
                        start_ns = 0
                        has_failed = response.error is not None
                        has_answered = has_answered or not has_failed
                        yield response
                        start_ns = time.monotonic_ns()
                finally:
                    timing.infer_ns += time.monotonic_ns() - start_ns if start_ns else 0
        except Exception:
            has_failed = True
            raise
        finally:
            counted.num_running -= 1
            if has_answered or not has_failed:  # a refused request was not executed
                self._statistics.batch_executed(self._batch_size(request), input_ns=0, infer_ns=timing.infer_ns)

    async def stop(self) -> None:
        self._stopped = True
