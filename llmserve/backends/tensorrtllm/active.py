"""Running requests, by tenant and the client's request id, which `stop` ends. Ids need not be unique."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import TypeVar

from llmserve.serving.types import InferRequest

Item = TypeVar("Item")


class ActiveRequest:
    """One running request. Belongs to one event loop."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._puller: asyncio.Task[object] | None = None

    def cancel(self) -> None:
        if self.is_cancelled:
            return
        self.is_cancelled = True
        if self._puller is not None:  # end the wait at once; otherwise the next pull sees the mark
            self._puller.cancel()

    async def pull(self, stream: AsyncGenerator[Item, None]) -> Item | None:
        """The next item; None if the stream has ended, or was closed by `cancel`."""
        if self.is_cancelled:
            await stream.aclose()
            return None
        self._puller = task = asyncio.current_task()
        assert task is not None
        try:
            return await anext(stream, None)
        except asyncio.CancelledError:
            if not self.is_cancelled or task.uncancel():  # another caller also cancels the task
                raise
            return None
        finally:
            self._puller = None


class ActiveRequests:
    def __init__(self) -> None:
        self._by_id: dict[tuple[str, str], set[ActiveRequest]] = {}

    @contextmanager
    def running(self, request: InferRequest) -> Iterator[ActiveRequest]:
        """Registered while the block runs."""
        active, request_id = ActiveRequest(), request.tenant_request_id
        self._by_id.setdefault(request_id, set()).add(active)
        try:
            yield active
        finally:
            same_id = self._by_id[request_id]
            same_id.discard(active)
            if not same_id:
                del self._by_id[request_id]

    def cancel_like(self, request: InferRequest) -> None:
        """Cancel every running request of the same tenant and id; there may be none, because it has just ended."""
        for active in tuple(self._by_id.get(request.tenant_request_id, ())):
            active.cancel()
