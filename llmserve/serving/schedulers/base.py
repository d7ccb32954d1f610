"""The interface between the core and schedulers, which decide when a model's request runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from llmserve.errors import InvalidArgument, Unavailable
from llmserve.serving.instruments.model_statistics import RequestTiming
from llmserve.serving.types import InferRequest, InferResponse


class Rejected(Unavailable):
    """The request never ran: its queue was full, it waited too long, or the model is stopping."""


class SequenceError(InvalidArgument):
    """The request never ran: it does not fit into a sequence."""


class ModelScheduler(Protocol):
    """The scheduler of one version of a model. Call it on the event loop."""

    @property
    def num_pending(self) -> int:
        """Requests that wait for an instance."""
        ...

    def infer(self, request: InferRequest, timing: RequestTiming) -> AsyncGenerator[InferResponse, None]:
        """Run a checked request, and fill in `timing` by the end of the stream. Closing it cancels the request."""
        ...

    async def stop(self) -> None:
        """Refuse waiting and new requests. Running requests continue."""
        ...
