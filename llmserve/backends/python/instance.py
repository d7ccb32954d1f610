"""An instance of a Python model: sends batches to its host, and returns responses to the loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias, runtime_checkable

from llmserve.backends.python.host import ModelSpec
from llmserve.backends.python.line import ServerLine, StreamLine
from llmserve.backends.python.services import Services
from llmserve.errors import Unavailable
from llmserve.serving.backend import Execution, Released
from llmserve.serving.streams import Outbox
from llmserve.serving.types import InferRequest, InferResponse

FINALIZE_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


Kill: TypeAlias = Callable[[str], None]
Done: TypeAlias = Callable[[Execution | None], None]

# If the previous batches took less than BRIEF_NS, the instance receives up to MAX_ROOM batches ahead of time, because
# handing over each one separately would cost as much as executing it.
BRIEF_NS = 200_000
MAX_ROOM = 32


class Host(Protocol):
    """Where the model runs. `submit` is called on the loop; its callbacks may be called from any thread."""

    @property
    def is_async(self) -> bool:
        """Whether several batches may run at the same time. Known once it has started."""
        ...

    def start(self) -> Future[None]:
        """Start to load the model; the future is done when the model can execute."""
        ...

    @property
    def queues(self) -> bool:
        """Whether it accepts further batches while one runs, and runs them one after the other."""
        ...

    def submit(self, work: Sequence[tuple[InferRequest, ServerLine]], on_done: Done, outbox: Outbox) -> Kill:
        """`on_done` is called when it can accept another batch; this call and all responses go through `outbox`.

        The returned function ends the batch, if possible, with a reason.
        """
        ...

    def alive(self) -> bool: ...

    def problem(self) -> str:
        """Why it cannot accept a batch now; "" if it can."""
        ...

    def abandon(self) -> None:
        """Release it without waiting, because the model will not be used."""
        ...

    def stop(self, timeout_s: float) -> bool:
        """Finalize, and wait. False if the model is still busy after `timeout_s`."""
        ...


@runtime_checkable
class InlineHost(Host, Protocol):
    """A host in this process, whose model can be called on any thread: see `InlineInstance`."""

    @property
    def max_inline_bytes(self) -> int: ...

    def execute_inline(self, request: InferRequest) -> InferResponse: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a batch may run before its host is killed, in seconds; 0: no limit."""

    execution_s: float = 0.0
    abandoned_s: float = 0.0  # after its last client has gone


NO_LIMITS = Limits()


@dataclass(slots=True, eq=False)
class _Batch:
    """A batch that occupies the instance. Belongs to the loop."""

    streams: Sequence[StreamLine]
    kill: Kill = lambda why: None
    on_done: Done | None = None
    is_done: bool = False
    timers: tuple[asyncio.TimerHandle, ...] = ()

    def done(self, execution: Execution | None) -> None:
        """May be called more than once."""
        self.is_done = True
        for timer in self.timers:
            timer.cancel()
        on_done, self.on_done = self.on_done, None
        if on_done is not None:
            on_done(execution)


class PythonInstance:
    def __init__(
        self,
        spec: ModelSpec,
        services: Services,
        make_host: Callable[[Callable[[], None]], Host],
        *,
        limits: Limits = NO_LIMITS,
    ) -> None:
        """`make_host` receives the function that the host calls when the model cannot serve any more."""
        self.name = spec.instance_name
        self.room = 1
        self._spec = spec
        self._services = services
        self._host = make_host(self._report_death)
        self._inline_host = self._host if isinstance(self._host, InlineHost) else None
        self._limits = limits
        self._outbox: Outbox | None = None
        self._streams: set[StreamLine] = set()  # without a final response so far
        self._last_batch: _Batch | None = None
        self._batches: dict[_Batch, None] = {}  # which occupy the instance
        self._recent_ns = BRIEF_NS  # recent execution times: at least the last one, and the mean

    def start(self) -> Future[None]:
        """Start to load the model; the future is done when the model can execute."""
        return self._host.start()

    def execute(self, requests: Sequence[InferRequest]) -> Sequence[AsyncGenerator[InferResponse, None]]:
        if self._host.problem():
            raise self._unavailable()
        if self._outbox is None:
            self._outbox = Outbox(asyncio.get_running_loop())
        streams = [StreamLine(self._post) for _ in requests]
        self._streams.update(streams)
        self._last_batch = batch = _Batch(streams)
        if self._limits.abandoned_s:
            for stream in streams:
                stream.when_cancelled(partial(self._notice_close, batch))
        work = list(zip(requests, streams, strict=True))
        batch.kill = self._host.submit(work, partial(self._put_done, batch), self._outbox)
        if self._limits.execution_s:
            _kill_after(batch, self._limits.execution_s, f"took longer than {self._limits.execution_s:g} s")
        return streams

    @property
    def max_inline_bytes(self) -> int:
        return self._inline_host.max_inline_bytes if self._inline_host is not None else 0

    def execute_inline(self, request: InferRequest) -> InferResponse:
        assert self._inline_host is not None
        return self._inline_host.execute_inline(request)

    def when_released(self, callback: Released) -> None:
        assert self._last_batch is not None
        if self._spec.decoupled and self._host.is_async:
            asyncio.get_running_loop().call_soon(callback, None)  # its coroutines run at the same time
        else:
            self._last_batch.on_done = callback
            self._batches[self._last_batch] = None
        self._last_batch = None

    def healthy(self) -> bool:
        return self._host.alive()

    def abandon(self) -> None:
        self._host.abandon()
        self._services.close()

    async def close(self) -> None:
        finished = await asyncio.to_thread(self._host.stop, FINALIZE_TIMEOUT_S)
        if not finished:
            logger.warning("model instance '%s' is still busy after %g s: abandoned", self.name, FINALIZE_TIMEOUT_S)
        self._services.close()
        self._end_streams(Unavailable(f"model instance '{self.name}' has been unloaded"))

    def _notice_close(self, batch: _Batch) -> None:
        """A client no longer waits."""
        limit_s = self._limits.abandoned_s
        if not batch.is_done and all(stream.closed for stream in batch.streams):
            _kill_after(batch, limit_s, f"ran for {limit_s:g} s although no request was waiting for it")

    def _report_death(self) -> None:
        """From any thread. Without an outbox, no batch can be on its way."""
        if self._outbox is not None:
            self._outbox.put(self._end_everything)

    def _end_everything(self) -> None:
        """Answer what the host had left to do; batches that wait for the instance stop waiting."""
        self._end_streams(self._unavailable())
        for batch in list(self._batches):
            self._finish(batch, None)

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"model instance '{self.name}' {self._host.problem()}")

    def _end_streams(self, error: Unavailable) -> None:
        for stream in list(self._streams):
            response = InferResponse(self._spec.model_name, self._spec.version, error=error, final=True)
            self._deliver(stream, response)

    def _put_done(self, batch: _Batch, execution: Execution | None) -> None:
        """From any thread."""
        assert self._outbox is not None
        self._outbox.put(partial(self._finish, batch, execution))

    def _finish(self, batch: _Batch, execution: Execution | None) -> None:
        self._batches.pop(batch, None)
        if execution is not None:
            took_ns = execution.ended_ns - execution.began_ns
            self._recent_ns = max(took_ns, self._recent_ns + (took_ns - self._recent_ns) // 8)
            self.room = MAX_ROOM if self._recent_ns < BRIEF_NS and self._host.queues else 1
        batch.done(execution)

    def _post(self, stream: StreamLine, response: InferResponse) -> None:
        """From any thread."""
        assert self._outbox is not None
        self._outbox.put(partial(self._deliver, stream, response))

    def _deliver(self, stream: StreamLine, response: InferResponse) -> None:
        if stream not in self._streams:
            return  # it has already ended, with the instance
        stream.push(response)
        if response.final:
            self._streams.discard(stream)


def _kill_after(batch: _Batch, limit_s: float, why: str) -> None:
    timer = asyncio.get_running_loop().call_later(limit_s, batch.kill, f"was ended: a batch {why}")
    batch.timers += (timer,)
