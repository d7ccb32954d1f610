"""One request on its way through a scheduler, and the stream that its client reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from llmserve.errors import InvalidArgument
from llmserve.serving.instruments.model_statistics import RequestTiming
from llmserve.serving.schedulers.base import Rejected
from llmserve.serving.signature import request_label
from llmserve.serving.streams import ResponseStream
from llmserve.serving.types import InferRequest, InferResponse, Rescheduled

if TYPE_CHECKING:
    from llmserve.serving.schedulers.instances import RunningBatch

BatchKey: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
NOT_ITERATIVE = (
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to handle "
    "such a flag; this requires sequence_batching { iterative_sequence: true } in its config.pbtxt"
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

    async def started(self) -> int:
        """Wait until its stream can be read; when it was started. Raises why it is refused, or has failed."""
        if self.stream is None and self.error is None:
            self.dispatched = asyncio.get_running_loop().create_future()
            await self.dispatched
        if self.previous is not None and not self.previous.done():
            await asyncio.shield(self.previous)
        if self.error is not None:
            raise self.error
        return self.start_ns

    async def next_response(self, asked_ns: int) -> InferResponse | None:
        """None at the end. The wait is the model's time, from `asked_ns` on; what the reader does between is not."""
        assert self.stream is not None
        try:
            return await anext(self.stream, None)
        finally:
            self.timing.infer_ns += time.monotonic_ns() - asked_ns

    async def leave_stream(self) -> None:
        """Nobody reads it any more."""
        stream, self.stream, self.dispatched = self.stream, None, None
        if stream is not None:
            await stream.aclose()

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
    has_ended = False
    try:
        asked_ns = await queued.started()
        while (response := await queued.next_response(asked_ns)) is not None:
            if isinstance(response, Rescheduled):
                if reschedule is None:
                    raise InvalidArgument(NOT_ITERATIVE)
                await queued.leave_stream()
                reschedule(queued)
                asked_ns = await queued.started()
                continue
            if receive is not None:
                response = receive(queued, response)
            if response.final:
                has_ended = queued.is_over = True
                on_end(queued)
                yield response
                return
            yield response
            asked_ns = time.monotonic_ns()
    except Exception:
        queued.is_over = True
        raise
    finally:
        if not has_ended:
            on_end(queued)
        await queued.leave_stream()
