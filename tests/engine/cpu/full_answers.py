"""Answers with all that an engine tells of them, to compare bit for bit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import aclosing

from llmserve.core import GenerateRequest, SamplingParams, TopTokens
from llmserve.engine.base import Engine

Answer = tuple[Sequence[int], Sequence[float], Sequence[TopTokens]]
SAMPLING = SamplingParams(max_tokens=12, temperature=0.7, top_p=0.9, seed=4)


def full_answers(engine: Engine, prompts: Iterable[Sequence[int]]) -> tuple[list[Answer], list[int]]:
    """Drawn, one after the other; and how many tokens of each prompt were found. Closes the engine."""

    async def answer(prompt: Sequence[int]) -> tuple[Answer, int]:
        request = GenerateRequest("r", tuple(prompt), SAMPLING, return_log_probs=True, num_top_log_probs=3)
        async with aclosing(engine.submit(request)) as events:
            told = [event async for event in events]
        usage = told[-1].usage
        assert usage is not None
        tokens = [token for event in told for token in event.token_ids]
        log_probs = [log_prob for event in told for log_prob in event.log_probs]
        return (tokens, log_probs, [top for event in told for top in event.top]), usage.cached_tokens

    async def every() -> list[tuple[Answer, int]]:
        return [await answer(prompt) for prompt in prompts]

    try:
        found = asyncio.run(every())
    finally:
        engine.close()
    return [told for told, _ in found], [cached for _, cached in found]
