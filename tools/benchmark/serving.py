"""Measures the whole engine with its queue and batching: opening, memory, Python's share, in-flight against static
batching, and time to the first token under load."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from llmserve.core import GenerateRequest, SamplingParams
from llmserve.engine.base import Engine, RunnerInfo, StepResult
from llmserve.engine.cpu.runner import CpuRunner, read_header
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.inflight import InflightEngine
from llmserve.scheduler.plan import Chunk, SampleRequest, StepPlan
from llmserve.scheduler.settings import SchedulerSettings
from tools.benchmark.cells import FIRST_ID
from tools.benchmark.job import Job
from tools.benchmark.ours import engine_directory
from tools.benchmark.statistics import quantile
from tools.benchmark.workload import Task, arriving, ideal_gain, mixed_tasks, static_batches

BATCH = 32
NUM_TASKS = 96
NUM_OPENINGS = 7
LOAD = 0.7  # share of the throughput of in-flight batching
WARM_TOKENS = 16
SHARE_TOKENS = 64
READ_BYTES = 2**24

Say = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class StepTiming:
    num_sequences: int
    num_tokens: int
    began_ns: int
    native_ns: int  # inside the library

    def is_decode_of(self, batch: int) -> bool:
        return self.num_sequences == self.num_tokens == batch


class TimedRunner:
    """A runner with batches of at most `max_batch_size` sequences, which records the time of each step."""

    def __init__(self, runner: CpuRunner, max_batch_size: int) -> None:
        self._runner = runner
        self._info = dataclasses.replace(runner.info, max_batch_size=max_batch_size)
        self.timings: list[StepTiming] = []

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def step(self, plan: StepPlan) -> StepResult:
        began, native = time.perf_counter_ns(), self._runner.native_ns
        result = self._runner.step(plan)
        native = self._runner.native_ns - native
        self.timings.append(StepTiming(len(plan.chunks), plan.num_tokens, began, native))
        return result

    def close(self) -> None:
        self._runner.close()


@dataclass(frozen=True, slots=True)
class Served:
    """Times of one task's tokens, in seconds of time.perf_counter."""

    submitted: float
    times: tuple[float, ...]

    @property
    def first_token_s(self) -> float:
        return self.times[0] - self.submitted


class Client:
    """Submits tasks to an engine, on the event loop that runs it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = itertools.count()

    async def serve(self, task: Task, new_tokens: int = 0) -> Served:
        sampling = SamplingParams(max_tokens=new_tokens or task.new_tokens, temperature=0.0)
        request = GenerateRequest(str(next(self._ids)), task.prompt, sampling)
        submitted, times = time.perf_counter(), []
        async with aclosing(self._engine.submit(request)) as events:
            async for event in events:
                times += [time.perf_counter()] * len(event.token_ids)
        return Served(submitted, tuple(times))

    async def serve_all(self, tasks: Sequence[Task]) -> list[Served]:
        """Submits each task at its arrival time."""

        async def later(task: Task) -> Served:
            await asyncio.sleep(task.arrival_s)
            return await self.serve(task)

        return list(await asyncio.gather(*map(later, tasks)))

    async def serve_static(self, tasks: Sequence[Task], *, padded: bool) -> float:
        """Returns the seconds for all, one batch after the other. `padded`: a complete answer is continued until the
        batch's longest one is complete; otherwise it leaves, and its place stays empty."""
        started = time.perf_counter()
        for batch in static_batches(tasks, BATCH):
            longest = max(task.new_tokens for task in batch)
            await asyncio.gather(*(self.serve(task, longest if padded else 0) for task in batch))
        return time.perf_counter() - started


def serve(job: Job, say: Say) -> None:
    """Makes all measurements of an engine that `ours.prepare` has built, as records."""
    path = EngineDirectory.open(engine_directory(job)).engine_file
    say({"kind": "serving", "what": "opening", **opening(path, job.threads)})
    tasks = mixed_tasks(NUM_TASKS, vocab=job.shape.vocab, seed=job.seed)
    with opened_engine(job, path, max(len(task.prompt) + task.new_tokens for task in tasks)) as (engine, runner):
        client = Client(engine)
        asyncio.run(_all(client, runner, tasks, say))


async def _all(client: Client, runner: TimedRunner, tasks: Sequence[Task], say: Say) -> None:
    await asyncio.gather(*(client.serve(task, WARM_TOKENS) for task in tasks[:BATCH]))
    say({"kind": "serving", "what": "python", **await python_share(client, runner, tasks[:BATCH])})
    batching = await static_against_inflight(client, tasks)
    say({"kind": "serving", "what": "batching", **batching})
    mean_tokens = sum(task.new_tokens for task in tasks) / len(tasks)
    per_second = LOAD * batching["inflight_tokens_per_s"] / mean_tokens
    say({"kind": "serving", "what": "load", **await under_load(client, tasks, per_second)})


@contextmanager
def opened_engine(job: Job, path: Path, longest: int) -> Iterator[tuple[InflightEngine, TimedRunner]]:
    block_size = read_header(path).block_size
    num_blocks = BATCH * (-(-longest // block_size) + 1)
    runner = TimedRunner(CpuRunner.open(path, num_blocks=num_blocks, threads=job.threads), BATCH)
    info = EngineDirectory.open(engine_directory(job)).info()
    settings = SchedulerSettings(enable_block_reuse=False)  # the same prompts are used several times
    engine = InflightEngine(runner, info, settings)
    try:
        yield engine, runner
    finally:
        engine.close()


def opening(path: Path, threads: int) -> dict[str, float]:
    """Measures the seconds until an engine in the page cache can run a step, and its memory after one."""
    with path.open("rb") as file:
        while file.read(READ_BYTES):
            pass
    header, seconds, held = read_header(path), [], 0
    for _ in range(NUM_OPENINGS):
        before, started = psutil.Process().memory_info().rss, time.perf_counter()
        runner = CpuRunner.open(path, num_blocks=BATCH, threads=threads)
        seconds.append(time.perf_counter() - started)
        runner.step(StepPlan((Chunk(0, (FIRST_ID,), 0, (0,), SampleRequest(SamplingParams(), 0, 1)),)))
        held = psutil.Process().memory_info().rss - before
        runner.close()
    return {
        "seconds": median(seconds),
        "file_bytes": path.stat().st_size,
        "kv_pool_bytes": BATCH * header.kv_bytes_per_block,
        "activation_bytes": header.activation_bytes,
        "held_bytes": held,
    }


async def python_share(client: Client, runner: TimedRunner, tasks: Sequence[Task]) -> dict[str, float]:
    """The share of time outside the library, in decode steps of a full batch, each until the next one begins."""
    runner.timings.clear()
    await asyncio.gather(*(client.serve(task, SHARE_TOKENS) for task in tasks))
    pairs = [
        (one.native_ns, after.began_ns - one.began_ns)
        for one, after in itertools.pairwise(runner.timings)
        if one.is_decode_of(len(tasks)) and after.is_decode_of(len(tasks))
    ]
    native, wall = (sum(column) for column in zip(*pairs, strict=True))
    return {"share": 1 - native / wall, "steps": len(pairs), "step_ms": wall / len(pairs) / 1e6}


async def static_against_inflight(client: Client, tasks: Sequence[Task]) -> dict[str, float]:
    started = time.perf_counter()
    await client.serve_all(tasks)
    inflight = time.perf_counter() - started
    leaving = await client.serve_static(tasks, padded=False)
    padded = await client.serve_static(tasks, padded=True)
    total = sum(task.new_tokens for task in tasks)
    return {
        "inflight_tokens_per_s": total / inflight,
        "gain_over_static": padded / inflight,
        "gain_over_static_leaving": leaving / inflight,
        "ideal_gain": ideal_gain(tasks, BATCH),
    }


async def under_load(client: Client, tasks: Sequence[Task], per_second: float) -> dict[str, float]:
    """Measures milliseconds to the first token and between tokens, alone and while requests arrive and leave."""
    alone = [(await client.serve(task, 1)).first_token_s for task in tasks[:5]]
    started = time.perf_counter()
    served = await client.serve_all(arriving(tasks, per_second=per_second))
    seconds = time.perf_counter() - started
    firsts = [one.first_token_s for one in served]
    gaps = [later - earlier for one in served for earlier, later in itertools.pairwise(one.times)]
    return {
        "requests_per_s": per_second,
        "tokens_per_s": sum(len(one.times) for one in served) / seconds,
        "first_token_alone_ms": 1e3 * median(alone),
        "first_token_p50_ms": 1e3 * quantile(firsts, 0.5),
        "first_token_p95_ms": 1e3 * quantile(firsts, 0.95),
        "between_tokens_p50_ms": 1e3 * quantile(gaps, 0.5),
        "between_tokens_p95_ms": 1e3 * quantile(gaps, 0.95),
    }
