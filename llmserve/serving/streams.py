"""Response streams that are filled from outside: by another thread, or by callbacks on the loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

from llmserve.serving.types import InferResponse


class ResponseStream(AsyncGenerator[InferResponse, None]):
    """Yields pushed responses, up to and including the final one.

    Unlike a native async generator, it can be filled before it is read, and it notices a close before the first read.
    Call `push` and the generator methods on the loop; `closed` may be read from any thread.
    """

    __slots__ = ("_ended", "_responses", "_waiter", "closed")

    def __init__(self) -> None:
        self.closed = False  # responses that are still pushed are discarded
        self._ended = False  # the final response has been read
        self._responses: deque[InferResponse] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def push(self, response: InferResponse) -> None:
        if self.closed:
            return
        self._responses.append(response)
        self._wake()

    def wake_first(self, reader: asyncio.Future[None]) -> None:
        """Set the future `reader`, on which the reader waits, when the first response or the end comes."""
        self._waiter = reader
        if self._responses or self.closed:
            self._wake()

    async def __anext__(self) -> InferResponse:
        while not self._responses:
            if self.closed or self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        response = self._responses.popleft()
        if response.final:
            self._ended = True
        return response

    async def asend(self, value: None) -> InferResponse:
        return await self.__anext__()

    async def athrow(self, typ: Any, val: Any = None, tb: Any = None) -> InferResponse:
        await self.aclose()
        raise typ

    async def aclose(self) -> None:
        if not self.closed:
            self.closed = True
            self._responses.clear()
            self._wake()
            self.left()

    def left(self) -> None:
        """Called once, on the loop, when nobody reads any more, also after the final response."""

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Outbox:
    """Carries calls from any thread to the loop, in order, with one wake-up for all that are waiting.

    `with outbox:` delays the wake-up, so that related calls arrive together.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.RLock()  # a destructor may call `put` while its thread holds the lock
        self._waiting: list[Callable[[], None]] = []
        self._num_holds = 0
        self._is_called = False  # the loop was woken but has not run `_flush` yet

    def put(self, call: Callable[[], None]) -> None:
        with self._lock:
            self._waiting.append(call)
            wakes = not self._is_called and not self._num_holds
            self._is_called |= wakes
        if wakes:
            self._wake()

    def __enter__(self) -> None:
        with self._lock:
            self._num_holds += 1

    def __exit__(self, *failure: object) -> None:
        with self._lock:
            self._num_holds -= 1
            wakes = bool(self._waiting) and not self._is_called and not self._num_holds
            self._is_called |= wakes
        if wakes:
            self._wake()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to read
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        with self._lock:
            calls, self._waiting = self._waiting, []
            self._is_called = False
        for call in calls:
            call()
