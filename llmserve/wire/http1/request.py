"""One request, as its handler sees it: the body may still be arriving, and the client may disconnect at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from llmserve.wire.event_loop import INLINE_BYTES
from llmserve.wire.pieces import Pieces
from llmserve.wire.request_memory import RequestMemory, Share

Result = TypeVar("Result")
NO_PARAMETERS: Mapping[str, str] = MappingProxyType({})
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class ClientGone(Exception):
    """The client disconnected, so nobody waits for the answer."""


class Request:
    """A request. Its connection creates it, and adds to its body. Names of headers are in lower case."""

    __slots__ = (
        "_cancelled_with_client", "_first", "_index", "_is_gone", "_on_wait", "_pieces", "_waiter", "answer_headers",
        "fields", "has_ended", "is_http10", "keeps_alive", "memory", "method", "num_bytes", "path", "path_params",
        "query", "share",
    )  # fmt: skip

    def __init__(
        self,
        method: str,
        path: str,
        fields: list[tuple[bytes, bytes]],
        *,
        keeps_alive: bool,
        is_http10: bool,
        query: bytes = b"",
    ) -> None:
        self.method = method
        self.path = path  # decoded, without the query
        self.query = query  # as it came
        self.path_params = NO_PARAMETERS  # that the route read from the path
        self.answer_headers = NO_HEADERS  # added to its answer, whatever it is
        self.keeps_alive = keeps_alive  # the connection serves further requests after this one
        self.is_http10 = is_http10  # the client does not support chunks
        self.has_ended = False  # the body is complete
        self.num_bytes = 0  # of the body so far, including forgotten ones
        self.memory: RequestMemory  # of the server; set, with the share, before the request is handled
        self.share: Share
        self.fields = fields
        self._index = dict(reversed(fields))  # the first of several wins
        self._first = b""  # the body, while it is one piece
        self._pieces: Pieces | None = None
        self._is_gone = False
        self._cancelled_with_client: asyncio.Task[Any] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._on_wait: Callable[[], None] | None = None

    def header(self, name: bytes) -> str | None:
        value = self._index.get(name)
        return None if value is None else value.decode("latin-1")

    def header_items(self) -> list[tuple[str, str]]:
        return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in self.fields]

    async def body(self) -> bytes | memoryview:
        """The body received so far, unless forgotten. Call it once: pieces are removed as they are joined."""
        pieces, self._pieces = self._pieces, None
        if pieces is None:
            return self._first
        if pieces.num_bytes <= INLINE_BYTES:
            return pieces.small()
        return await self.memory.work(pieces.taken, self.share)

    def forget_body(self) -> None:
        self._first, self._pieces = b"", None

    async def more_body(self) -> None:
        """Wait until more of the body has come, or its end. Raises `ClientGone`."""
        if self._is_gone:
            raise ClientGone
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            if self._on_wait is not None:
                on_wait, self._on_wait = self._on_wait, None
                on_wait()  # more may come as soon as this is called
            await self._waiter
        finally:
            self._waiter = None

    async def while_connected(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await `work`. If the client disconnects meanwhile, the task that handles this request is cancelled."""
        if self._is_gone:
            work.close()
            raise ClientGone
        self._cancelled_with_client = asyncio.current_task()
        try:
            return await work
        finally:
            self._cancelled_with_client = None

    # for the connection

    @property
    def is_awaited(self) -> bool:
        """Whether the handler waits for more of the body, or is about to read it."""
        return self._waiter is not None

    def before_waiting(self, action: Callable[[], None]) -> None:
        """Call `action` before the next wait for the body."""
        self._on_wait = action

    def add(self, data: bytes) -> None:
        self.num_bytes += len(data)
        if self._pieces is not None:
            self._pieces.add(data)
        elif not self._first:
            self._first = data
        else:
            self._pieces = Pieces()
            self._pieces.add(self._first)
            self._pieces.add(data)
            self._first = b""
        self._wake()

    def end(self) -> None:
        self.has_ended = True
        self._wake()

    def client_is_gone(self) -> None:
        self._is_gone = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ClientGone())
        if self._cancelled_with_client is not None:
            self._cancelled_with_client.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
