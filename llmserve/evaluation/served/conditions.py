"""How questions arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from llmserve.benchmark.arrivals import Gamma, arrival_times
from llmserve.benchmark.records import Record
from llmserve.evaluation.served.replies import Asker, Question, ServedAnswer

SEED = 0  # of arrivals
Told = Callable[[int], None]  # of replies, as they come


async def one_at_a_time(asker: Asker, questions: Sequence[Question], told: Told) -> list[ServedAnswer]:
    replies = []
    for question in questions:
        replies.append(await asker.ask(question))
        told(1)
    return replies


async def at_once(asker: Asker, questions: Sequence[Question], limit: int, told: Told) -> list[ServedAnswer]:
    """`limit` in flight, as long as there are so many."""
    slots = asyncio.Semaphore(limit)

    async def ask(question: Question) -> ServedAnswer:
        async with slots:
            reply = await asker.ask(question)
        told(1)
        return reply

    return await _all([ask(question) for question in questions])


async def staggered(asker: Asker, questions: Sequence[Question], rate: float, told: Told) -> list[ServedAnswer]:
    """As they come: at random times, `rate` a second on average, so that prompts meet answers that are under way."""
    times = arrival_times(Gamma(), rate, np.random.default_rng(SEED))

    async def ask(question: Question, after_s: float) -> ServedAnswer:
        await asyncio.sleep(after_s)
        reply = await asker.ask(question)
        told(1)
        return reply

    return await _all([ask(question, after_s) for question, after_s in zip(questions, times, strict=False)])


async def _all(calls: Sequence[Coroutine[Any, Any, ServedAnswer]]) -> list[ServedAnswer]:
    """In order; when we are cancelled, all of them are."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call) for call in calls]
    return [task.result() for task in tasks]


def most_at_once(records: Sequence[Record]) -> int:
    """Requests that were under way at the same time."""
    begun = [(record.started, 1) for record in records if record.arrived]
    ended = [(record.arrived[-1], -1) for record in records if record.arrived]
    steps = np.cumsum([step for _, step in sorted(begun + ended)])
    return int(steps.max(initial=0))
