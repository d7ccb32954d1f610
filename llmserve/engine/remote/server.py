"""`EngineServer`: one engine for many clients on a Unix socket.

Runs on one event loop. Each request is a task that reads its stream of the engine. Events from one turn of the loop,
which is one step, are sent as one frame per client. If a client disconnects, its streams are closed. If it does not
read, it is disconnected when its buffer is full: neither the engine nor other clients wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from llmserve.core import Allowance, GenerateRequest, Guide, Tenant
from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.base import AdapterEngine, Engine, MeteringEngine
from llmserve.engine.remote.frames import MAX_REQUEST_BYTES, Frame, FrameReader, Kind, ProtocolError, preamble
from llmserve.engine.remote.messages import (
    EngineState,
    EventWriter,
    GuideSource,
    error_document,
    hello_frame,
    read_adapter,
    read_digest,
    read_submit,
    read_tenant,
)
from llmserve.errors import EngineFileError, InternalError, LlmserveError, Unavailable, Unsupported

CompileGuide = Callable[[str, str], Awaitable[Guide]]  # from its kind and text; `InvalidArgument` if that is impossible

PRIVATE_SOCKET = 0o600
STATE_PERIOD_S = 0.1  # the longest delay until clients know the engine's statistics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """The most that a client that does not read may cost."""

    waiting_bytes: int = 1 << 26  # above this, it is disconnected if it has read nothing for `stalled_s`
    stalled_s: float = 5.0
    most_waiting_bytes: int = 1 << 30  # above this, in any case


async def no_guides(kind: str, text: str) -> Guide:
    raise Unsupported(
        f"guided_decoding_guide_type {kind}: this engine's process has no tokenizer to compile guides with"
    )


class EngineServer:
    """Serves one engine to many clients. Does not own `engine`. `serve` may be called once."""

    def __init__(
        self, engine: Engine, *, compile_guide: CompileGuide = no_guides, limits: ClientLimits | None = None
    ) -> None:
        self.engine = engine
        self.compile_guide = compile_guide
        self.limits = limits or ClientLimits()
        self.clients = set[Client]()
        self.is_draining = False
        self._numbers = 0
        self._server: asyncio.Server | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def serve(self, path: Path) -> None:
        """Listen at `path`, to which only this user can connect. An existing socket is replaced."""
        path.unlink(missing_ok=True)  # noqa: ASYNC240 - before anybody is served
        self._server = await asyncio.get_running_loop().create_unix_server(self._client, str(path))
        os.chmod(path, PRIVATE_SOCKET)
        self._watcher = asyncio.create_task(self._tell_state())

    async def drain(self, timeout_s: float) -> None:
        """Wait until open streams have ended, or for `timeout_s`. New ones are refused from now on."""
        self.is_draining = True
        streams = [task for client in self.clients for task in client.streams.values()]
        if streams:
            await asyncio.wait(streams, timeout=timeout_s)

    async def close(self, reason: LlmserveError | None = None) -> None:
        """Open streams of all clients end with `reason`."""
        if self._server is not None:
            self._server.close()
        if self._watcher is not None:
            self._watcher.cancel()
        for client in tuple(self.clients):
            client.leave(reason or Unavailable("the engine has been closed"))

    def state(self, tenants: set[Tenant]) -> EngineState:
        engine = self.engine
        allowances: dict[Tenant, Allowance] = {}
        if isinstance(engine, MeteringEngine):
            allowances = {tenant: engine.allowance(tenant) for tenant in tenants}
        return EngineState(engine.stats(), engine.healthy(), allowances)

    def _client(self) -> Client:
        self._numbers += 1
        return Client(self, self._numbers)

    async def _tell_state(self) -> None:
        while True:
            await asyncio.sleep(STATE_PERIOD_S)
            for client in tuple(self.clients):
                client.tell_state()


class Client(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, server: EngineServer, number: int) -> None:
        self._server = server
        self._number = number
        self._reader = FrameReader(MAX_REQUEST_BYTES)
        self.streams: dict[int, asyncio.Task[None]] = {}
        self._events: EventWriter | None = None  # in this turn of the loop
        self._tenants = set[Tenant]()
        self._adapters = Counter[str]()  # digests, with how often it added them
        self._calls = set[asyncio.Task[None]]()  # that add or remove adapters
        self._state: EngineState | None = None  # the last state that it was sent
        self._sent = self._taken = 0  # bytes
        self._taken_at = time.monotonic()
        self._is_gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the same methods without the class
        self._loop = asyncio.get_running_loop()
        self._server.clients.add(self)
        self._state = self._server.state(self._tenants)
        self._write(preamble() + hello_frame(self._server.engine.info, self._state).encoded())

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._reader.feed(data):
                self._receive(frame)
        except ProtocolError as error:
            logger.warning("client %d of the engine's socket was disconnected: %s", self._number, error)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_gone = True
        self._server.clients.discard(self)
        for task in self.streams.values():
            task.cancel()
        for digest in self._adapters.elements():
            self._call(self._remove_adapter(digest))

    def leave(self, reason: LlmserveError) -> None:
        self._write(Frame(Kind.GOODBYE, error_document(reason)).encoded())
        self._transport.close()

    def tell_state(self) -> None:
        """Send what has changed."""
        state = self._server.state(self._tenants)
        if state != self._state:
            self._state = state
            self._write(Frame(Kind.STATE, state.document()).encoded())

    def _receive(self, frame: Frame) -> None:
        if frame.kind is Kind.SUBMIT:
            stream_id, request, guide = read_submit(frame)
            if stream_id in self.streams:
                raise ProtocolError(f"stream {stream_id} is already open")
            if request.tenant.max_answers or request.tenant.tokens_per_minute:
                self._tenants.add(request.tenant)
            task = self.streams[stream_id] = self._loop.create_task(self._answer(stream_id, request, guide))
            # not in the task itself: if cancelled in the same data, it never starts
            task.add_done_callback(lambda _: self.streams.pop(stream_id))
        elif frame.kind is Kind.CANCEL:
            for stream_id in frame.integers:
                if (stream := self.streams.get(stream_id)) is not None:  # else it has just ended
                    stream.cancel()
        elif frame.kind is Kind.WATCH:
            self._tenants.add(read_tenant(frame.document))
        elif frame.kind is Kind.ADD_ADAPTER:
            self._call(self._add_adapter(*read_adapter(frame)))
        elif frame.kind is Kind.REMOVE_ADAPTER:
            self._call(self._remove_adapter(read_digest(frame)))
        else:
            raise ProtocolError(f"a frame of kind {frame.kind.name}, which only engines send")

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` after the requests that came before it."""
        task = self._loop.create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _add_adapter(self, call: int, path: Path, digest: str) -> None:
        """The border: the client gets any error."""
        answer: dict[str, Any] = {"call": call}
        try:
            engine = self._server.engine
            if not isinstance(engine, AdapterEngine):
                raise Unsupported(f"the engine {engine.info.name} does not support adapters")
            adapter = await asyncio.to_thread(SealedAdapter.open, path)
            if adapter.digest != digest:
                raise EngineFileError(f"adapter {path} has changed; load it again")
            await asyncio.to_thread(engine.add_adapter, adapter)
            if self._is_gone:
                engine.remove_adapter(digest)
            else:
                self._adapters[digest] += 1
        except LlmserveError as error:
            answer["error"] = error_document(error)
        except Exception as error:
            logger.exception("adapter %s cannot be loaded", path)
            answer["error"] = error_document(InternalError(f"the engine's process failed: {error!r}"))
        self._write(Frame(Kind.ADDED, answer).encoded())

    async def _remove_adapter(self, digest: str) -> None:
        engine = self._server.engine
        if self._adapters[digest] > 0 and isinstance(engine, AdapterEngine):
            self._adapters[digest] -= 1
            engine.remove_adapter(digest)

    async def _answer(self, stream_id: int, request: GenerateRequest, guide: GuideSource | None) -> None:
        """The border: the client gets any error."""
        try:
            if self._server.is_draining:
                raise Unavailable("the engine's process is shutting down: send the request again")
            if guide is not None:
                request = replace(request, guide=await self._server.compile_guide(*guide))
            async with aclosing(self._server.engine.submit(request)) as stream:
                async for event in stream:
                    self._step().add(stream_id, event)
        except LlmserveError as error:
            self._step().fail(stream_id, error)
        except Exception as error:
            logger.exception("request %s failed", request.request_id)
            self._step().fail(stream_id, InternalError(f"the engine's process failed: {error!r}"))

    def _step(self) -> EventWriter:
        """Events from this turn of the loop are sent after the last of them."""
        if self._events is None:
            self._events = EventWriter()
            self._loop.call_soon(self._flush)
        return self._events

    def _flush(self) -> None:
        events, self._events = self._events, None
        assert events is not None
        try:
            data = events.frame().encoded()
        except Exception:  # the border: without an end, streams would wait forever
            logger.exception("the engine's output cannot be sent; client %d is disconnected", self._number)
            self._transport.abort()
            return
        self._write(data)

    def _write(self, data: bytes) -> None:
        if self._is_gone or self._transport.is_closing():
            return
        if (waiting := self._transport.get_write_buffer_size()) and self._is_stuck(waiting):
            logger.error(
                "client %d of the engine's socket does not read and was disconnected: %d bytes were waiting",
                self._number,
                waiting,
            )
            self._transport.abort()
            return
        self._transport.write(data)
        self._sent += len(data)

    def _is_stuck(self, waiting: int) -> bool:
        limits, now, taken = self._server.limits, time.monotonic(), self._sent - waiting
        if taken > self._taken:
            self._taken, self._taken_at = taken, now
        is_stalled = now - self._taken_at >= limits.stalled_s
        return waiting > (limits.waiting_bytes if is_stalled else limits.most_waiting_bytes)
