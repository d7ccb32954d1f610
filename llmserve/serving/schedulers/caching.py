"""The response cache in front of a model's scheduler: requests with a cached answer do not run again."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from itertools import count

from llmserve.serving.instruments.model_statistics import RequestTiming
from llmserve.serving.schedulers.base import ModelScheduler
from llmserve.serving.schedulers.response_cache import ResponseCache, response_key
from llmserve.serving.types import InferRequest, InferResponse

_loads = count()  # distinguishes a model from the one that it replaces


class CachingScheduler:
    """For models that answer each request once and keep no state between requests."""

    def __init__(self, scheduler: ModelScheduler, cache: ResponseCache) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._prefix = next(_loads).to_bytes(8, "little")
        self._stopped = False

    @property
    def num_pending(self) -> int:
        return self._scheduler.num_pending

    async def infer(self, request: InferRequest, timing: RequestTiming) -> AsyncGenerator[InferResponse, None]:
        if request.chooses_adapter:  # another adapter may get the same name later
            async with aclosing(self._scheduler.infer(request, timing)) as stream:
                async for response in stream:
                    yield response
            return
        start_ns = time.monotonic_ns()
        key = response_key(self._prefix, request)
        cached = self._cache.lookup(key)
        timing.cache_ns = time.monotonic_ns() - start_ns
        if cached is not None:
            timing.cache_hit = True
            yield replace(cached, request_id=request.request_id)
            return
        answer: InferResponse | None = None
        has_failed = False
        async with aclosing(self._scheduler.infer(request, timing)) as stream:
            async for response in stream:
                if response.error is None and response.outputs:
                    answer = response
                elif response.error is not None:
                    has_failed = True
                if response.final and answer is not None and not has_failed and not self._stopped:
                    start_ns = time.monotonic_ns()
                    self._cache.insert(key, replace(answer, final=True))
                    timing.cache_ns += time.monotonic_ns() - start_ns
                yield response

    async def stop(self) -> None:
        self._stopped = True
        self._cache.drop_model(self._prefix)
        await self._scheduler.stop()
