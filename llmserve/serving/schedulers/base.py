"""The seam between the core and whatever decides when a request of a model runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from llmserve.errors import InvalidArgument, Unavailable
from llmserve.serving.instruments.model_statistics import RequestTiming
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
