"""What a path stands for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Protocol

from grpc import StatusCode

from llmserve.wire.http2.headers import Metadata
from llmserve.wire.http2.messages import BadMessage, Message
from llmserve.wire.request_memory import Share

LARGEST_BYTES = 1024 * 1024  # of a message that holds no data


class OpenedCall(Protocol):
    """A call whose head has come."""

    answer_metadata: Sequence[tuple[str, str]]  # goes before the first message; printable ASCII
    context: Context | None  # its handler's; None: the connection's

    @property
    def path(self) -> str: ...

    @property
    def status(self) -> StatusCode | None:
        """That the client has been told, or would have been."""
        ...

    def invocation_metadata(self) -> Metadata: ...

    def add_done_callback(self, callback: Callable[[Any], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class Method:
    """`handle(request, context)` gives the answer; of a streaming method, `handle(context)` does everything.

    `open` sees every call first; it may say what goes with the answer and in which context it is handled.
    `refuse` looks at a call's metadata before anything of its messages is taken, and says why it is not served.
    """

    handle: Callable[..., Awaitable[Any]]
    parse: Callable[[bytes], Any]  # of a message with at most `event_loop.INLINE_BYTES`, on the event loop
    parse_large: Callable[[Message, Share], Any] | None = None  # of a larger one, in a thread; grows the share first
    largest_bytes: int = LARGEST_BYTES
    streams: bool = False
    open: Callable[[OpenedCall], None] | None = None
    refuse: Callable[[Metadata], BadMessage | None] | None = None
