"""The seam between the core and whatever decides when a request of a model runs."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Protocol

from llmserve.errors import InvalidArgument, Unavailable
from llmserve.serving.statistics import RequestTiming
from llmserve.serving.types import InferRequest, InferResponse


class Rejected(Unavailable):
    """The request never ran: its queue was full, it waited too long, or the model is stopping."""


class SequenceError(InvalidArgument):
    """The request never ran: it does not belong to a sequence as it should."""


class ModelScheduler(Protocol):
    """One per version of a model. All calls on the event loop."""

    @property
    def num_pending(self) -> int:
        """Requests that wait for an instance."""
        ...

    def infer(self, request: InferRequest, timing: RequestTiming) -> AsyncGenerator[InferResponse, None]:
        """Run a checked request, and fill in `timing` by the end of the stream. Closing it cancels the request."""
        ...

    async def stop(self) -> None:
        """Refuse what waits and what comes. Running requests go on."""
        ...


async def timed_next(
    stream: AsyncGenerator[InferResponse, None], timing: RequestTiming, start_ns: int = 0
) -> InferResponse | None:
    """The next response, or None at the end. The wait is the model's time; what the reader does between is not.

    `start_ns`: when the model began to make it, if that was before now.
    """
    start_ns = start_ns or time.monotonic_ns()
    try:
        return await anext(stream, None)
    finally:
        timing.infer_ns += time.monotonic_ns() - start_ns
