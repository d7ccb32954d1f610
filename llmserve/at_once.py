"""Runs the same work on many items, a limited number at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

Given = TypeVar("Given")
Found = TypeVar("Found")


async def at_once(work: Callable[[Given], Awaitable[Found]], given: Iterable[Given], most: int) -> list[Found]:
    """Returns the results of `work` in the order of `given`; at most `most` items run at a time.

    The first failure cancels the others and is raised as it is, not in a group.
    """
    slots = asyncio.Semaphore(most)

    async def run(one: Given) -> Found:
        async with slots:
            return await work(one)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(one)) for one in given]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
