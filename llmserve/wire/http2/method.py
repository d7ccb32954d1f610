"""The method of a path: its handler, its parsers and its limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Protocol

from grpc import StatusCode

from llmserve.wire.http2.headers import Metadata
from llmserve.wire.http2.messages import BadMessage, Message
from llmserve.wire.request_memory import Share

LARGEST_BYTES = 1024 * 1024  # of a message without tensor data


class OpenedCall(Protocol):
    """A call whose head has been received."""

    answer_metadata: Sequence[tuple[str, str]]  # sent before the first message; printable ASCII
    context: Context | None  # its handler's; None: the connection's

    @property
    def path(self) -> str: ...

    @property
    def status(self) -> StatusCode | None:
        """The status sent to the client, or that would have been sent; None: not known yet."""
        ...

    def invocation_metadata(self) -> Metadata: ...

    def add_done_callback(self, callback: Callable[[Any], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class Method:
    """`handle(request, context)` returns the answer; for a streaming method, `handle(context)` reads and writes itself.

    `open` is called first for every call; it may set the metadata of the answer and the context of the handler.
    `refuse` checks a call's metadata before any of its messages are taken, and returns the reason for a refusal.
    """

    handle: Callable[..., Awaitable[Any]]
    parse: Callable[[bytes], Any]  # parses a message with at most `event_loop.INLINE_BYTES`, on the event loop
    parse_large: Callable[[Message, Share], Any] | None = None  # parses a larger one in a thread; grows the share first
    largest_bytes: int = LARGEST_BYTES
    streams: bool = False
    open: Callable[[OpenedCall], None] | None = None
    refuse: Callable[[Metadata], BadMessage | None] | None = None
