"""`RemoteEngine`: the `Engine` protocol over one connection to an engine's process.

A separate thread reads the socket, and passes the events of a step to the consumers' loops with one thread-safe call
each, like an engine in this process. Only `connect` waits for the engine, for its first frame; other methods use its
last report. When the connection ends, every stream ends with `Unavailable`; requests are not repeated.

Imports only numpy and llmserve's definitions of requests and events.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmserve.core import Allowance, GenerateRequest, Tenant, TokenEvent
from llmserve.engine.base import EngineInfo, EngineStats
from llmserve.engine.remote.frames import (
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    Frame,
    FrameReader,
    Kind,
    ProtocolError,
    preamble,
)
from llmserve.engine.remote.messages import (
    EngineState,
    guide_source,
    read_added,
    read_error,
    read_events,
    read_hello,
    submit_frame,
    tenant_document,
)
from llmserve.engine.stream import EngineEnd, Outbox, TokenStream
from llmserve.engine.validation import check_request
from llmserve.errors import InvalidArgument, LlmserveError, Unavailable

if TYPE_CHECKING:
    from llmserve.engine.adapters.sealed import SealedAdapter

CONNECT_TIMEOUT_S = 10.0  # for a process that is ready
CLOSE_TIMEOUT_S = 10.0
MINUTE_S = 60.0
RECEIVED_BYTES = 1 << 18

logger = logging.getLogger(__name__)


class RemoteEngine:
    """One connection to an engine. `close` ends it, and leaves the engine running for other clients."""

    def __init__(self, connection: socket.socket, reader: FrameReader, first: Sequence[Frame]) -> None:
        """See `connect`. `first`: frames that have already arrived, starting with the engine's hello."""
        self._info, self._state = read_hello(first[0])
        self._state_at = time.monotonic()
        self._reader = reader
        self._lock = threading.Lock()  # guards the following
        self._streams: dict[int, TokenStream] = {}
        self._end = EngineEnd()
        self._watched = set[Tenant]()
        self._adapters = Counter[str]()  # digests, with how often they were added
        self._calls: dict[int, Future[None]] = {}  # calls without an answer yet
        self._ids = itertools.count()
        for frame in first[1:]:
            self._receive(frame)
        self._loop = asyncio.new_event_loop()
        self._transport: asyncio.Transport | None = None
        self._has_begun = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(connection,), name=f"llmserve-remote-{self._info.name}", daemon=True
        )
        self._thread.start()
        self._has_begun.wait()

    @classmethod
    def connect(cls, path: Path, *, timeout_s: float = CONNECT_TIMEOUT_S) -> RemoteEngine:
        """Raises `Unavailable` if no engine with this protocol version answers in time."""
        connection = socket.socket(socket.AF_UNIX)
        reader = FrameReader(MAX_ANSWER_BYTES)
        first: list[Frame] = []
        try:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.sendall(preamble())
            while not first:
                data = connection.recv(RECEIVED_BYTES)
                if not data:
                    raise ProtocolError("the engine closed the connection before it described itself")
                first += reader.feed(data)
            return cls(connection, reader, first)
        except (OSError, ProtocolError) as error:
            connection.close()
            raise Unavailable(f"no engine is listening at {path}: {error}") from error

    @property
    def info(self) -> EngineInfo:
        return self._info

    def submit(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """See `Engine.submit`. Problems that only the engine can detect are raised at the first pull."""
        self._end.check()
        info = self._info
        check_request(
            request, vocab_size=info.vocab_size, max_seq_len=info.max_seq_len, max_beam_width=info.max_beam_width,
            pools=bool(info.pooling), adapters=self._adapters.keys(),
        )  # fmt: skip
        if request.guide is not None:
            guide_source(request.guide)  # refuses guides that cannot be sent
        return self._stream(request)

    def stats(self) -> EngineStats:
        """Returns the engine's last report, at most a tenth of a second old."""
        return self._state.stats

    def allowance(self, tenant: Tenant) -> Allowance:
        """See `MeteringEngine`. For a tenant that is new to this client, its full allowance."""
        self._watch(tenant)
        told = replace(tenant, adapters=None)  # not sent to the engine
        left, passed_s = self._state.allowances.get(told), time.monotonic() - self._state_at
        if left is None:
            return Allowance(tenant.max_answers, tenant.tokens_per_minute, 0.0)
        back = int(passed_s * tenant.tokens_per_minute / MINUTE_S)
        num_tokens = min(tenant.tokens_per_minute, left.num_tokens + back)
        return Allowance(left.num_answers, num_tokens, max(0.0, left.tokens_back_s - passed_s))

    def add_adapter(self, adapter: SealedAdapter) -> None:
        """See `AdapterEngine`. The engine's process reads the directory."""
        call, done = next(self._ids), Future[None]()
        with self._lock:
            self._end.check()
            self._calls[call] = done
        document = {"call": call, "path": str(adapter.path.absolute()), "digest": adapter.digest}
        self._soon(self._send, Frame(Kind.ADD_ADAPTER, document).encoded())
        done.result()
        with self._lock:
            self._adapters[adapter.digest] += 1

    def remove_adapter(self, digest: str) -> None:
        """See `AdapterEngine`."""
        with self._lock:
            self._adapters[digest] -= 1
            if self._adapters[digest] <= 0:  # negative if it could not be added again
                del self._adapters[digest]
        self._soon(self._send, Frame(Kind.REMOVE_ADAPTER, {"digest": digest}).encoded())

    def healthy(self) -> bool:
        return self._end.reason is None and self._state.is_healthy

    def close(self) -> None:
        """End the connection; open streams end with `Unavailable`. May be called again."""
        self._shut(Unavailable("the engine has been closed"))
        self._soon(self._abort)
        self._thread.join(CLOSE_TIMEOUT_S)

    def wait(self) -> None:
        """Wait until the connection has ended."""
        self._thread.join()

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        stream_id = next(self._ids)
        stream = TokenStream(asyncio.get_running_loop(), request.num_answers)
        data = submit_frame(request, stream_id).encoded()
        if len(data) > MAX_REQUEST_BYTES:
            raise InvalidArgument(f"the request has {len(data)} bytes; an engine accepts at most {MAX_REQUEST_BYTES}")
        with self._lock:
            self._end.check()
            self._streams[stream_id] = stream
        self._soon(self._send, data)
        try:
            while stream.num_open:
                yield await stream.get()
        finally:
            with self._lock:
                is_open = self._streams.pop(stream_id, None) is not None
            if is_open and stream.num_open:
                self._soon(self._send, Frame(Kind.CANCEL, integers=[stream_id]).encoded())

    def _watch(self, tenant: Tenant) -> None:
        with self._lock:
            is_new = tenant not in self._watched
            self._watched.add(tenant)
        if is_new:
            self._soon(self._send, Frame(Kind.WATCH, tenant_document(tenant)).encoded())

    def _soon(self, callback: object, *arguments: object) -> None:
        """Runs the callback on the connection's thread, unless that has ended."""
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)  # type: ignore[arg-type]
        except RuntimeError:  # the loop is closed
            logger.debug("the connection to engine %s has ended", self._info.name)

    # The following methods run on the connection's thread.

    def _run(self, connection: socket.socket) -> None:
        try:
            self._loop.run_until_complete(self._receive_all(connection))
        except Exception as error:  # the border: every open stream gets the error
            logger.exception("the connection to engine %s failed", self._info.name)
            self._shut(Unavailable(f"the connection to the engine failed: {error!r}"))
        finally:
            self._has_begun.set()
            self._loop.close()

    async def _receive_all(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        ended = self._loop.create_future()
        self._transport, _ = await self._loop.create_unix_connection(lambda: _Connection(self, ended), sock=connection)
        self._has_begun.set()
        await ended

    def _send(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def read(self, data: bytes) -> None:
        """Handles data from the socket."""
        try:
            for frame in self._reader.feed(data):
                self._receive(frame)
        except ProtocolError as error:
            self._shut(Unavailable(f"the engine's process sent an invalid message: {error}"))
            self._abort()

    def lost(self) -> None:
        self._shut(Unavailable("the engine's process ended or closed the connection; try again"))

    def _receive(self, frame: Frame) -> None:
        if frame.kind is Kind.EVENTS:
            outbox = Outbox()
            events = read_events(frame)
            with self._lock:
                for stream_id, item in events:
                    stream = self._streams.get(stream_id)
                    if stream is not None:  # otherwise its consumer has left
                        outbox.put(stream, item)
                        if isinstance(item, LlmserveError):
                            del self._streams[stream_id]
            for loop in outbox.flush():
                self._leave_loop(loop)
        elif frame.kind is Kind.STATE:
            self._state, self._state_at = EngineState.read(frame.document), time.monotonic()
        elif frame.kind is Kind.ADDED:
            call, error = read_added(frame)
            with self._lock:
                done = self._calls.pop(call, None)
            if done is not None:
                done.set_result(None) if error is None else done.set_exception(error)
        elif frame.kind is Kind.GOODBYE:
            self._shut(read_error(frame.document))
        else:
            raise ProtocolError(f"a frame of kind {frame.kind.name}, which engines must not send at this point")

    def _leave_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel the streams of consumers whose loop has closed."""
        with self._lock:
            gone = [stream_id for stream_id, stream in self._streams.items() if stream.loop is loop]
            for stream_id in gone:
                del self._streams[stream_id]
        self._send(Frame(Kind.CANCEL, integers=gone).encoded())

    def _shut(self, error: LlmserveError) -> None:
        with self._lock:
            outbox = self._end.say(error, self._streams.values())
            self._streams.clear()
            calls, self._calls = self._calls, {}
            idle = replace(EngineStats(), tokens_per_block=self._state.stats.tokens_per_block)
            self._state = EngineState(idle, False, {})
        outbox.flush()
        for done in calls.values():
            done.set_exception(error)


class _Connection(asyncio.Protocol):
    def __init__(self, engine: RemoteEngine, ended: asyncio.Future[None]) -> None:
        self._engine = engine
        self._ended = ended

    def data_received(self, data: bytes) -> None:
        self._engine.read(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.lost()
        if not self._ended.done():
            self._ended.set_result(None)
