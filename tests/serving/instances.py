"""Instances without a backend, which note what they get, and clients that send numbered requests to a scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from llmserve.serving.backend import Execution, Released
from llmserve.serving.instruments.model_statistics import RequestTiming
from llmserve.serving.schedulers.base import ModelScheduler
from llmserve.serving.types import InferRequest, InferResponse, Rescheduled, Tensor
from tests.serving.models import request


@dataclass(eq=False)
class Instance:
    """Answers each request when its gate is open."""

    name: str = "i"
    batches: list[list[str]] = field(default_factory=list)
    requests: list[Sequence[InferRequest]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    closed: list[str] = field(default_factory=list)
    num_responses: int = 1
    works: bool = True
    answer: Callable[[InferRequest], tuple[Tensor, ...]] = lambda wanted: ()
    rounds: dict[str, int] = field(default_factory=dict)  # how often a request, by its id, is wanted again

    def execute(self, requests: Sequence[InferRequest]) -> Sequence[AsyncGenerator[InferResponse, None]]:
        self.batches.append([wanted.request_id for wanted in requests])
        self.requests.append(requests)
        return [self._respond(wanted) for wanted in requests]

    async def _respond(self, wanted: InferRequest) -> AsyncGenerator[InferResponse, None]:
        try:
            for index in range(self.num_responses):
                await self.gate.wait()
                final = index == self.num_responses - 1
                if final and self.rounds.get(wanted.request_id):
                    self.rounds[wanted.request_id] -= 1
                    await asyncio.sleep(0)
                    yield Rescheduled("m", "1", wanted.request_id, final=True)
                else:
                    yield InferResponse("m", "1", wanted.request_id, self.answer(wanted), final=final)
        finally:
            self.closed.append(wanted.request_id)

    def healthy(self) -> bool:
        return self.works

    async def close(self) -> None:
        pass


@dataclass(eq=False)
class ReleasingOne(Instance):
    """Is free only when the test says so."""

    release: Callable[[], None] = lambda: None

    def when_released(self, callback: Released) -> None:
        self.release = partial(callback, None)


@dataclass(eq=False)
class QueueingOne(Instance):
    """Has a line of its own, and says when it began and ended with each batch."""

    room: int = 1
    releases: list[Released] = field(default_factory=list)

    def when_released(self, callback: Released) -> None:
        self.releases.append(callback)

    def finish(self, execution: Execution) -> None:
        """The batch at the head of the line."""
        self.releases.pop(0)(execution)


class Client:
    """Sends numbered requests and keeps the order in which they end."""

    def __init__(self, target: ModelScheduler) -> None:
        self.target = target
        self.ended: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.timings: dict[str, RequestTiming] = {}
        self.responses: dict[str, list[InferResponse]] = {}

    async def send(self, *names: str, width: int = 1, rows: int = 1, **fields: Any) -> None:
        for name in names:
            tensor = Tensor("X", "FP32", np.zeros((rows, width), np.float32))
            self.timings[name] = RequestTiming()
            self.responses[name] = []
            self.tasks[name] = asyncio.create_task(self._run(request("m", tensor, request_id=name, **fields)))
        await settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await asyncio.gather(self.tasks[name], return_exceptions=True)

    async def wait(self) -> None:
        async with asyncio.timeout(30):
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    def error(self, name: str) -> BaseException | None:
        return self.tasks[name].exception()

    async def _run(self, wanted: InferRequest) -> None:
        async with aclosing(self.target.infer(wanted, self.timings[wanted.request_id])) as stream:
            async for response in stream:
                self.responses[wanted.request_id].append(response)
        self.ended.append(wanted.request_id)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)
