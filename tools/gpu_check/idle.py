"""Measures how long a GPU waits for the host between the steps of an engine.

    python -m tools.gpu_check.idle ENGINE REPORT BATCHES

For each number of decoding sequences, it measures a step on the device alone, with graphs in direct succession. It
compares this with the time from one token of a sequence to the next in the engine, including its scheduler.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from llmserve.core import GenerateRequest, SamplingParams
from llmserve.engine.base import Engine
from llmserve.engine.cuda.bindings import NvidiaDevice
from llmserve.engine.cuda.device import Device
from llmserve.engine.cuda.layout import read_header
from llmserve.engine.cuda.runner import CudaRunner
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.inflight import InflightEngine
from llmserve.scheduler.settings import SchedulerSettings
from tools.benchmark.cells import Cell, random_prompts

PROMPT_TOKENS, NEW_TOKENS = 32, 128
WARM_TOKENS = 16  # of an answer; before that, others may still be computing their prompts
REPLAYS = 20


def measure(
    directory: EngineDirectory, batches: Sequence[int], open_device: Callable[[], Device] = NvidiaDevice
) -> list[dict[str, Any]]:
    """One row for each batch size that the engine supports."""
    block_size = read_header(directory.engine_file).block_size
    blocks = -(-(PROMPT_TOKENS + NEW_TOKENS) // block_size) + 1  # of a sequence
    runner = CudaRunner(directory.engine_file, open_device(), num_blocks=max(batches) * blocks)
    engine = InflightEngine(runner, directory.info(), SchedulerSettings(max_queue_size=0, enable_block_reuse=False))
    try:
        return [_row(engine, runner, batch) for batch in batches if batch <= engine.info.max_batch_size]
    finally:
        engine.close()


def _row(engine: Engine, runner: CudaRunner, batch: int) -> dict[str, Any]:
    asyncio.run(_gaps(engine, batch, seed=0))  # a warm-up
    in_engine = median(asyncio.run(_gaps(engine, batch, seed=1)))
    runner.replay(batch, 1)
    started = time.perf_counter()
    runner.replay(batch, REPLAYS)
    on_device = (time.perf_counter() - started) / REPLAYS
    return {
        "batch": batch, "device_ms": 1e3 * on_device, "engine_ms": 1e3 * in_engine,
        "idle_share": max(0.0, 1 - on_device / in_engine),
    }  # fmt: skip


async def _gaps(engine: Engine, batch: int, *, seed: int) -> list[float]:
    """Seconds between the tokens of one of `batch` answers."""
    cell = Cell("decode", batch, PROMPT_TOKENS, NEW_TOKENS)
    prompts = random_prompts(cell, engine.info.vocab_size, seed)
    times = await asyncio.gather(*(_times(engine, tuple(prompt)) for prompt in prompts))
    last = times[-1][WARM_TOKENS:]
    return [after - before for before, after in pairwise(last)]


async def _times(engine: Engine, prompt: tuple[int, ...]) -> list[float]:
    request = GenerateRequest("idle", prompt, SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0))
    async with aclosing(engine.submit(request)) as stream:
        return [time.perf_counter() async for _ in stream]


def main(directory: str, report: str, batches: str) -> None:
    rows = measure(EngineDirectory.open(Path(directory)), [int(batch) for batch in batches.split(",")])
    Path(report).write_text(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
