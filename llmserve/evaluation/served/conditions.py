"""The order and timing of questions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from llmserve.at_once import at_once
from llmserve.benchmark.arrivals import Gamma, arrival_times
from llmserve.benchmark.records import Record
from llmserve.evaluation.served.replies import Asker, Question, ServedAnswer

SEED = 0  # seed of arrivals
Told = Callable[[int], None]  # replies, as they arrive


async def in_flight(asker: Asker, questions: Sequence[Question], limit: int, told: Told) -> list[ServedAnswer]:
    """Keep `limit` requests in flight while there are enough."""

    async def ask(question: Question) -> ServedAnswer:
        reply = await asker.ask(question)
        told(1)
        return reply

    return await at_once(ask, questions, limit)


async def staggered(asker: Asker, questions: Sequence[Question], rate: float, told: Told) -> list[ServedAnswer]:
    """Start at random times, `rate` per second on average, so that prompts meet answers in progress."""
    times = arrival_times(Gamma(), rate, np.random.default_rng(SEED))

    async def ask(arrival: tuple[Question, float]) -> ServedAnswer:
        question, after_s = arrival
        await asyncio.sleep(after_s)
        reply = await asker.ask(question)
        told(1)
        return reply

    return await at_once(ask, zip(questions, times, strict=False), len(questions))


def most_at_once(records: Sequence[Record]) -> int:
    """The largest number of requests that were in flight at the same time."""
    begun = [(record.started, 1) for record in records if record.arrived]
    ended = [(record.arrived[-1], -1) for record in records if record.arrived]
    steps = np.cumsum([step for _, step in sorted(begun + ended)])
    return int(steps.max(initial=0))
