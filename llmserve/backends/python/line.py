"""The way back for a request in the server, to its response stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from llmserve.backends.python.responses import Line
from llmserve.serving.streams import ResponseStream
from llmserve.serving.types import InferResponse


class ServerLine(Line, Protocol):
    def when_cancelled(self, callback: Callable[[], None]) -> None:
        """Call `notice` on the loop when the client no longer waits, also after the final response."""
        ...


class StreamLine(ResponseStream):
    """The response stream itself."""

    __slots__ = ("_callbacks", "_post")
    shares_memory = True

    def __init__(self, post: Callable[[StreamLine, InferResponse], None]) -> None:
        """`post` may be called from any thread."""
        super().__init__()
        self._post = post
        self._callbacks: tuple[Callable[[], None], ...] = ()

    @property
    def cancelled(self) -> bool:
        return self.closed

    def post(self, response: InferResponse) -> None:
        self._post(self, response)

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        self._callbacks += (callback,)

    def left(self) -> None:
        callbacks, self._callbacks = self._callbacks, ()
        for callback in callbacks:
            callback()
