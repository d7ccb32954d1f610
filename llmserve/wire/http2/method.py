"""What a path stands for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from llmserve.wire.http2.headers import Metadata
from llmserve.wire.http2.messages import BadMessage, Message
from llmserve.wire.request_memory import Share

LARGEST_BYTES = 1024 * 1024  # of a message that holds no data


@dataclass(frozen=True, slots=True)
class Method:
    """`handle(request, context)` gives the answer; of a streaming method, `handle(context)` does everything.

    `refuse` looks at a call's metadata before anything of its messages is taken, and says why it is not served.
    """

    handle: Callable[..., Awaitable[Any]]
    parse: Callable[[bytes], Any]  # of a message with at most `event_loop.INLINE_BYTES`, on the event loop
    parse_large: Callable[[Message, Share], Any] | None = None  # of a larger one, in a thread; grows the share first
    largest_bytes: int = LARGEST_BYTES
    streams: bool = False
    refuse: Callable[[Metadata], BadMessage | None] | None = None
