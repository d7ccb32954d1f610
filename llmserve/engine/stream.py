"""The border between the step thread and the event loops that consume tokens.

`TokenStream` is the consumer's end of one request: filled and read on its own event loop, so without a lock. `Outbox`
collects the events of one step and hands them over with one thread-safe call per loop. `EngineEnd` is an engine's last
message.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from llmserve.core import TokenEvent
from llmserve.errors import LlmserveError, Unavailable

Item = TokenEvent | LlmserveError  # an error is the last item of a stream


@dataclass(eq=False, slots=True)
class TokenStream:
    """A slow consumer only grows its own buffer, by at most its own answers."""

    loop: asyncio.AbstractEventLoop
    num_open: int  # answers whose last event has not been read
    _items: asyncio.Queue[Item] = field(default_factory=asyncio.Queue)

    def put(self, item: Item) -> None:
        self._items.put_nowait(item)

    async def get(self) -> TokenEvent:
        """The next event; raises the error that ended the stream."""
        item = await self._items.get()
        if isinstance(item, LlmserveError):
            raise item
        self.num_open -= item.finish_reason is not None
        return item


class Outbox:
    """Events of many streams, on the way to their loops."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, list[tuple[TokenStream, Item]]] = defaultdict(list)

    def put(self, stream: TokenStream, item: Item) -> None:
        self._by_loop[stream.loop].append((stream, item))

    def flush(self) -> list[asyncio.AbstractEventLoop]:
        """Hand everything over. Returns the loops that are closed, where events can never be read."""
        closed = []
        for loop, items in self._by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, items)
            except RuntimeError:  # the loop is closed
                closed.append(loop)
        self._by_loop.clear()
        return closed


class EngineEnd:
    """Why an engine accepts no more requests, once it has ended. Guarded by the engine's lock where necessary."""

    def __init__(self) -> None:
        self.reason: LlmserveError | None = None

    def check(self) -> None:
        """`Unavailable` after the end."""
        if self.reason is not None:
            raise Unavailable(str(self.reason))

    def say(self, reason: LlmserveError, streams: Iterable[TokenStream]) -> Outbox:
        """Messages that end the open streams, to be flushed. The first reason is kept; later ones are ignored."""
        outbox = Outbox()
        if self.reason is None:
            self.reason = reason
            for stream in set(streams):
                outbox.put(stream, type(reason)(str(reason)))  # one exception each: they collect tracebacks
        return outbox


def _deliver(items: list[tuple[TokenStream, Item]]) -> None:
    for stream, item in items:
        stream.put(item)
