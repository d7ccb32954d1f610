"""One request on its way through a scheduler, and the stream that its client reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from llmserve.errors import InvalidArgument
from llmserve.serving.observe.model_statistics import RequestTiming
from llmserve.serving.schedulers.base import Rejected
from llmserve.serving.signature import request_label
from llmserve.serving.streams import ResponseStream
from llmserve.serving.types import InferRequest, InferResponse, Rescheduled

if TYPE_CHECKING:
    from llmserve.serving.schedulers.instances import RunningBatch

BatchKey: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
NOT_ITERATIVE = (
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to handle "
    "such a flag; that takes sequence_batching { iterative_sequence: true } in its config.pbtxt"
)


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One request in the scheduler, from its arrival to its end."""

    request: InferRequest  # as the model is to see it
    timing: RequestTiming
    level: int
    batch_size: int
    key: BatchKey  # requests with equal keys may share a batch
    arrival_ns: int  # in the queue
    dispatched: asyncio.Future[None] | None = None  # done when `stream` can be read or `error` is set
    stream: AsyncGenerator[InferResponse, None] | None = None
    error: Exception | None = None
    is_over: bool = False  # answered or refused; what ends before is cancelled
    timer: asyncio.TimerHandle | None = None
    batch: RunningBatch | None = None  # that it is part of
    start_ns: int = 0  # when that was given to an instance
    previous: asyncio.Future[None] | None = None  # preserve_ordering: answer after this one
    finished: asyncio.Future[None] | None = None

    @property
    def cancelled(self) -> bool:
        """Nobody waits for it any more, although its stream has not been closed yet."""
        return self.dispatched is not None and self.dispatched.cancelled()

    def refuse(self, problem: str) -> None:
        self.fail(Rejected(request_label(self.request) + problem))

    def fail(self, error: Exception) -> None:
        self.error = error
        self.wake()

    def start(self, stream: AsyncGenerator[InferResponse, None], batch: RunningBatch) -> None:
        self.stream = stream
        self.batch = batch
        self.start_ns = time.monotonic_ns()
        if isinstance(stream, ResponseStream) and self.dispatched is not None:
            stream.wake_first(self.dispatched)  # not before there is something to read
        else:
            self.wake()

    def end_turn(self) -> None:
        """Let the next in order answer, once those before this one have: a cancelled request may end before them."""
        if self.finished is None or self.finished.done():
            return
        if self.previous is None or self.previous.done():
            self.finished.set_result(None)
        else:
            self.previous.add_done_callback(lambda _: self.end_turn())

    def leave_batch(self) -> None:
        """Its stream is over, or nobody reads it."""
        batch, self.batch = self.batch, None
        if batch is not None:
            batch.stream_ended()

    def wake(self) -> None:
        if self.dispatched is not None and not self.dispatched.done():
            self.dispatched.set_result(None)


async def answer_queued(
    admit: Callable[[], QueuedRequest],
    on_end: Callable[[QueuedRequest], None],
    receive: Callable[[QueuedRequest, InferResponse], InferResponse] | None = None,
    reschedule: Callable[[QueuedRequest], None] | None = None,
) -> AsyncGenerator[InferResponse, None]:
    """The responses of the request that `admit` puts into its queue, or refuses by raising.

    `receive` sees each of them first. `on_end` is called once, when the request is answered (before its last response
    is read, so that the instance is free before the client has taken it), refused or cancelled. `reschedule` puts a
    request that the model wants again into its queue once more; without it, that is an error.
    """
    queued = admit()
    stream: AsyncGenerator[InferResponse, None] | None = None
    start_ns = 0
    has_ended = False
    try:
        while True:
            if stream is None:  # before each execution
                if queued.stream is None and queued.error is None:
                    queued.dispatched = asyncio.get_running_loop().create_future()
                    await queued.dispatched
                if queued.previous is not None and not queued.previous.done():
                    await asyncio.shield(queued.previous)
                if queued.error is not None:
                    raise queued.error
                assert queued.stream is not None
                stream, start_ns = queued.stream, queued.start_ns
            try:
                response = await anext(stream)
            except StopAsyncIteration:
                return
            finally:  # the wait is the model's time; what the reader does between is not
                queued.timing.infer_ns += time.monotonic_ns() - start_ns
            if response.final and isinstance(response, Rescheduled):
                if reschedule is None:
                    raise InvalidArgument(NOT_ITERATIVE)
                await stream.aclose()
                stream = queued.stream = queued.dispatched = None
                reschedule(queued)
                continue
            if receive is not None:
                response = receive(queued, response)
            if response.final:
                has_ended = queued.is_over = True
                on_end(queued)
                yield response
                return
            yield response
            start_ns = time.monotonic_ns()
    except Exception:
        queued.is_over = True
        raise
    finally:
        if not has_ended:
            on_end(queued)
        if queued.stream is not None:
            await queued.stream.aclose()
