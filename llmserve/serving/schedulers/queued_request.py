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

    request: InferRequest  # as the model gets it
    timing: RequestTiming
    level: int
    batch_size: int
    key: BatchKey  # requests with equal keys may share a batch
    arrival_ns: int  # in the queue
    dispatched: asyncio.Future[None] | None = None  # done when `stream` can be read or `error` is set
    stream: AsyncGenerator[InferResponse, None] | None = None
    error: Exception | None = None
    is_over: bool = False  # answered or refused; a request that ends before that is cancelled
    timer: asyncio.TimerHandle | None = None
    batch: RunningBatch | None = None  # the batch that it is part of
    start_ns: int = 0  # when the batch was given to an instance
    previous: asyncio.Future[None] | None = None  # preserve_ordering: answer after this one
    finished: asyncio.Future[None] | None = None

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for it any more, although its stream has not been closed yet."""
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
        """Wait until its stream can be read. Returns its start time. Raises its error if it was refused or failed."""
        if self.stream is None and self.error is None:
            self.dispatched = asyncio.get_running_loop().create_future()
            await self.dispatched
        if self.previous is not None and not self.previous.done():
            await asyncio.shield(self.previous)
        if self.error is not None:
            raise self.error
        return self.start_ns

    async def next_response(self, asked_ns: int) -> InferResponse | None:
        """The next response; None at the end. Time from `asked_ns` on is the model's; the reader's time is not."""
        assert self.stream is not None
        try:
            return await anext(self.stream, None)
        finally:
            self.timing.infer_ns += time.monotonic_ns() - asked_ns

    async def leave_stream(self) -> None:
        """Close the stream, which nobody reads any more."""
        stream, self.stream, self.dispatched = self.stream, None, None
        if stream is not None:
            await stream.aclose()

    def end_turn(self) -> None:
        """Let the next request in order answer, after those before this one: a cancelled request may end earlier."""
        if self.finished is None or self.finished.done():
            return
        if self.previous is None or self.previous.done():
            self.finished.set_result(None)
        else:
            self.previous.add_done_callback(lambda _: self.end_turn())

    def leave_batch(self) -> None:
        """Tell the batch that this stream is over or not read any more."""
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
    """The responses of the request that `admit` puts into its queue. `admit` raises to refuse it.

    `receive` gets each response first and returns the one to send. `on_end` is called once: when the request is refused
    or cancelled, or answered (before its last response is read, so that the instance is free before the client has
    taken it). `reschedule` puts a request back into its queue if the model asks for it again; None: that is an error.
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
