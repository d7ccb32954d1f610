"""What a response cache must not answer: requests whose adapter is chosen by a name that may be another's tomorrow."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import numpy as np
import pytest

from llmserve.serving.instruments.model_statistics import RequestTiming
from llmserve.serving.schedulers.caching import CachingScheduler
from llmserve.serving.schedulers.response_cache import ResponseCache
from llmserve.serving.types import InferRequest, InferResponse, Tensor


class Counting:
    """Answers with the number of its requests so far."""

    num_pending = 0

    def __init__(self) -> None:
        self.count = 0

    async def infer(self, request: InferRequest, timing: RequestTiming) -> AsyncGenerator[InferResponse, None]:
        self.count += 1
        yield InferResponse("m", "1", outputs=(Tensor("OUT", "INT32", np.array([self.count])),), final=True)

    async def stop(self) -> None:
        pass


X, SEVEN = Tensor("X", "INT32", np.array([1])), Tensor("lora_task_id", "UINT64", np.array([7]))


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        (InferRequest("m", {"X": X}), [1, 1]),
        (InferRequest("m", {"X": X}, parameters={"other": 1}), [1, 1]),
        (InferRequest("m", {"X": X}, parameters={"lora_name": "formal"}), [1, 2]),
        (InferRequest("m", {"X": X, "lora_task_id": SEVEN}), [1, 2]),
    ],
)
async def test_requests_that_choose_an_adapter_pass_the_cache(request_: InferRequest, wanted: list[int]) -> None:
    scheduler = CachingScheduler(Counting(), ResponseCache(1 << 20))
    found = []
    for _ in wanted:
        async with aclosing(scheduler.infer(request_, RequestTiming())) as stream:
            found += [int(response.outputs[0].data[0]) async for response in stream]
    assert found == wanted
