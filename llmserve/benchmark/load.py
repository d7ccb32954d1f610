"""Sends requests when they are due, records the results, and measures its own delays.

In a closed loop, each of a number of users sends a request when the previous one was answered. In an open loop,
requests arrive at a rate, independent of earlier answers, so any delay is this program's and is measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from llmserve.benchmark.arrivals import Arrivals, arrival_times
from llmserve.benchmark.records import Endpoint, LoadRequest, Record

WATCH_INTERVAL_S = 0.02
MIN_UNREACHABLE = 20  # consecutive requests without a server after which the run is given up


@dataclass(frozen=True, slots=True)
class Load:
    """How many requests are sent, and for how long. Set one of `concurrency` and `rate`, and one of the limits."""

    concurrency: int | None = None  # users of a closed loop
    rate: float | None = None  # arrivals per second of an open loop
    arrivals: Arrivals | None = None
    num_requests: int | None = None
    duration_s: float | None = None  # requests are started during this time
    grace_s: float = 30.0  # after `duration_s`, for running requests
    timeout_s: float = 600.0  # per request
    seed: int = 0  # of the arrivals


@dataclass(slots=True)
class Run:
    records: list[Record] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)  # delays of this program's event loop, in seconds
    busy: float = 0.0  # mean number of cores that this process used
    was_given_up: bool = False  # the server could not be reached any more
    was_interrupted: bool = False


async def run_load(
    endpoint: Endpoint,
    requests: Iterator[LoadRequest],
    load: Load,
    told: Callable[[Record], None] = lambda record: None,
) -> Run:
    """Sends from `requests`, which must be endless. Calls `told` for each request that was answered or failed.

    If cancelled, it ends early, and its result has the requests answered so far.
    """
    sender = _Sender(endpoint, requests, load, told)
    began, busy = time.perf_counter(), time.process_time()
    watching = asyncio.create_task(_watch(sender.run.lags))
    try:
        await (sender.closed_loop() if load.rate is None else sender.open_loop(load.rate))
    except asyncio.CancelledError:
        sender.run.was_interrupted = True
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
    finally:
        watching.cancel()
        await sender.stop()
    sender.run.busy = (time.process_time() - busy) / (time.perf_counter() - began)
    return sender.run


@dataclass(slots=True)
class _Sender:
    endpoint: Endpoint
    requests: Iterator[LoadRequest]
    load: Load
    told: Callable[[Record], None]
    run: Run = field(default_factory=Run)
    began: float = field(default_factory=time.perf_counter)
    num_begun: int = 0
    num_unreachable: int = 0  # consecutive
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def closed_loop(self) -> None:
        assert self.load.concurrency is not None
        for _ in range(self.load.concurrency):
            self.tasks.add(asyncio.create_task(self._user()))
        await self._finish()

    async def open_loop(self, rate: float) -> None:
        """The first request is due immediately."""
        load = self.load
        assert load.arrivals is not None
        for offset in arrival_times(load.arrivals, rate, np.random.default_rng(load.seed)):
            is_after_the_end = load.duration_s is not None and offset >= load.duration_s
            if is_after_the_end or not self._goes_on():
                break
            request, due = self._next(), self.began + offset
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            self.tasks.add(asyncio.create_task(self._one(request, Record(due=due))))
        await self._finish()

    async def stop(self) -> None:
        """Cancels the running requests."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _finish(self) -> None:
        load, remaining = self.load, None
        if load.duration_s is not None:
            remaining = max(self.began + load.duration_s - time.perf_counter(), 0) + load.grace_s
        done, _ = await asyncio.wait(self.tasks, timeout=remaining)
        for task in done:
            task.result()

    async def _user(self) -> None:
        while self._goes_on():
            await self._one(self._next(), Record())

    def _goes_on(self) -> bool:
        load = self.load
        if load.num_requests is not None and self.num_begun >= load.num_requests:
            return False
        if load.duration_s is not None and time.perf_counter() >= self.began + load.duration_s:
            return False
        self.run.was_given_up = self.num_unreachable >= max(MIN_UNREACHABLE, 2 * (load.concurrency or 0))
        return not self.run.was_given_up

    def _next(self) -> LoadRequest:
        self.num_begun += 1
        return next(self.requests)

    async def _one(self, request: LoadRequest, record: Record) -> None:
        self.run.records.append(record)
        record.started = time.perf_counter()
        try:
            async with asyncio.timeout(self.load.timeout_s):
                await self.endpoint.ask(request, record)
        except TimeoutError:
            record.fail("timeout", f"no complete answer within {self.load.timeout_s:g} s")
        except asyncio.CancelledError:
            record.is_cut = True
            raise
        if not record.arrived:
            record.fail("empty answer")
        self.num_unreachable = self.num_unreachable + 1 if record.is_unreachable else 0
        self.told(record)


async def _watch(lags: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(WATCH_INTERVAL_S)
        lags.append(time.perf_counter() - before - WATCH_INTERVAL_S)
