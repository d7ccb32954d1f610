"""Tokens per second of an engine for one sequence: in its prompt, and in its answer."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from llmserve.core import GenerateRequest, SamplingParams
from llmserve.engine.base import Engine
from llmserve.engine.open import open_engine

PROMPT_TOKENS = 512
NEW_TOKENS = 64
ROUNDS = 3  # the best one counts, because other programs only slow it down


@dataclass(frozen=True, slots=True)
class Speed:
    prompt: float  # tokens per second until the first new token
    answer: float  # tokens per second after it


def measure(directory: Path) -> Speed:
    engine = open_engine(directory)
    try:
        rounds = [asyncio.run(_one_round(engine, number)) for number in range(ROUNDS)]
    finally:
        engine.close()
    return Speed(max(each.prompt for each in rounds), max(each.answer for each in rounds))


async def _one_round(engine: Engine, number: int) -> Speed:
    length = min(PROMPT_TOKENS, engine.info.max_seq_len - NEW_TOKENS - 1)
    # a different prompt in each round, because the cache would have the same one
    prompt = tuple((7919 * (position + 1000 * number) + 17) % engine.info.vocab_size for position in range(length))
    request = GenerateRequest(f"speed-{number}", prompt, SamplingParams(max_tokens=NEW_TOKENS + 1, temperature=0.0))
    started = time.perf_counter()
    async with aclosing(engine.submit(request)) as stream:
        times = [time.perf_counter() async for _ in stream]
    return Speed(length / (times[0] - started), (len(times) - 1) / (times[-1] - times[0]))
