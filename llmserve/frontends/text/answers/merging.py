"""Merges several streams into one, in the order in which their items arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


async def merged(
    streams: Sequence[AsyncGenerator[Item, None]], most_at_once: int
) -> AsyncGenerator[tuple[int, Item], None]:
    """Yields items with their stream's index. At most `most_at_once` streams are open; an item waits until it is read.

    The first failure ends all streams.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    ready: asyncio.Queue[tuple[int, Item] | BaseException | None] = asyncio.Queue(1)
    open_streams = asyncio.Semaphore(most_at_once)

    async def read(place: int, stream: AsyncGenerator[Item, None]) -> None:
        try:
            async with open_streams, aclosing(stream) as items:
                async for item in items:
                    await ready.put((place, item))
        except Exception as error:  # border: raised again where the items are read
            await ready.put(error)
        else:
            await ready.put(None)

    tasks = [asyncio.create_task(read(place, stream)) for place, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            found = await ready.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                num_open -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
