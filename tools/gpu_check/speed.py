"""Tokens per second of an engine at several batch sizes.

    python -m tools.gpu_check.speed ENGINE REPORT BATCHES

All requests of a batch are sent at once; each has its own prompt, and all answers have the same length. The result is
the time from the first request to the last token, including prefill and the batcher.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from llmserve.engine.base import Engine
from llmserve.engine.open import open_engine
from llmserve.engine.settings import EngineSettings
from llmserve.scheduler.settings import SchedulerSettings
from tools.benchmark.cells import Cell, random_prompts
from tools.benchmark.serving import Client, Served
from tools.benchmark.statistics import Spread
from tools.benchmark.workload import Task

PROMPT_TOKENS, NEW_TOKENS = 32, 64
ROUNDS = 3


def measure(engine: Engine, batches: Sequence[int]) -> list[dict[str, Any]]:
    """One row for each batch size that the engine supports."""
    return asyncio.run(_measure(engine, [batch for batch in batches if batch <= engine.info.max_batch_size]))


async def _measure(engine: Engine, batches: Sequence[int]) -> list[dict[str, Any]]:
    client = Client(engine)
    rows: list[dict[str, Any]] = []
    for batch in batches:
        await _ask(client, engine, batch, seed=0)  # a warm-up
        rounds = [await _ask(client, engine, batch, seed=1 + number) for number in range(ROUNDS)]
        rate = Spread.of([batch * NEW_TOKENS / seconds for seconds, _ in rounds])
        rows.append({
            "batch": batch,
            "tokens_per_s": asdict(rate),
            "ratio": rate.median / rows[0]["tokens_per_s"]["median"] if rows else 1.0,
            "first_token_ms": 1e3 * median(one.first_token_s for _, served in rounds for one in served),
        })  # fmt: skip
    return rows


async def _ask(client: Client, engine: Engine, batch: int, *, seed: int) -> tuple[float, list[Served]]:
    cell = Cell("decode", batch, PROMPT_TOKENS, NEW_TOKENS)
    prompts = random_prompts(cell, engine.info.vocab_size, seed)
    started = time.perf_counter()
    served = await client.serve_all([Task(tuple(prompt), NEW_TOKENS) for prompt in prompts])
    return time.perf_counter() - started, served


def main(directory: str, report: str, batches: str) -> None:
    started = time.perf_counter()
    engine = open_engine(Path(directory), EngineSettings(scheduler=SchedulerSettings(max_queue_size=0)))
    opened_s = time.perf_counter() - started
    try:
        rows = measure(engine, [int(batch) for batch in batches.split(",")])
        content = {"open_seconds": opened_s, "rows": rows, "statistics": asdict(engine.stats())}
    finally:
        engine.close()
    Path(report).write_text(json.dumps(content))


if __name__ == "__main__":
    main(*sys.argv[1:])
