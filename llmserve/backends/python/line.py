"""The way back of a request in the server, to its response stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from llmserve.backends.python.responses import Line
from llmserve.serving.streams import ResponseStream
from llmserve.serving.types import InferResponse


class ServerLine(Line, Protocol):
    def when_cancelled(self, callback: Callable[[], None]) -> None:
        """Call it on the loop when nobody waits any more, also after the final response."""
        ...


class StreamLine:
    __slots__ = ("_on_close", "_post", "_stream")
    shares_memory = True

    def __init__(
        self,
        stream: ResponseStream,
        post: Callable[[ResponseStream, InferResponse], None],
        on_close: Callable[[], None],
    ) -> None:
        self._stream = stream
        self._post = post
        self._on_close: tuple[Callable[[], None], ...] = (on_close,)
        stream.on_close = self._close

    @property
    def cancelled(self) -> bool:
        return self._stream.closed

    def post(self, response: InferResponse) -> None:
        self._post(self._stream, response)

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        self._on_close += (callback,)

    def _close(self) -> None:
        for callback in self._on_close:
            callback()
