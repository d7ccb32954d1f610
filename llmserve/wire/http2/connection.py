"""One connection: handles its frames, all on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from grpc import StatusCode

from llmserve.wire.http2 import frames
from llmserve.wire.http2.call import WINDOW
from llmserve.wire.http2.calls import Calls
from llmserve.wire.http2.flood_limits import FloodLimit
from llmserve.wire.http2.frames import ConnectionFailed, frame
from llmserve.wire.http2.headers import (
    LARGE_BLOCK_BYTES,
    MAX_LIST_BYTES,
    UNSUPPORTED_MEDIA_TYPE,
    HeadDecoder,
    RequestHead,
)
from llmserve.wire.http2.keepalive import ConnectionLimits, Keepalive
from llmserve.wire.http2.method import Method
from llmserve.wire.http2.reader import MAX_FRAME, FrameReader
from llmserve.wire.http2.sender import Sender
from llmserve.wire.incoming import Incoming
from llmserve.wire.request_memory import RequestMemory
from llmserve.wire.turns import Pace

MAX_CALLS = 4096  # at the same time
CONNECTION_WINDOW = 64 * 1024 * 1024
CALLS_PER_COST = 64  # resizing their windows takes about as long as another useless frame
PREFACE_TIMEOUT_S = 20.0
CLOSE_TIMEOUT_S = 2.0  # for a client to read the last frames
OUR_PING = b"llmserve"
NO_LIMITS = ConnectionLimits()

OUR_SETTINGS = frames.settings({
    frames.MAX_CONCURRENT_STREAMS: MAX_CALLS, frames.INITIAL_WINDOW_SIZE: WINDOW, frames.MAX_FRAME_SIZE: MAX_FRAME,
    frames.MAX_HEADER_LIST_SIZE: MAX_LIST_BYTES,
})  # fmt: skip

logger = logging.getLogger(__name__)


class Connection(asyncio.Protocol):
    def __init__(
        self,
        methods: Mapping[str, Method],
        connections: set[Connection],
        memory: RequestMemory,
        limits: ConnectionLimits = NO_LIMITS,
    ) -> None:
        """`methods` by path; `connections` contains this one while it is open; `memory`: for all requests."""
        self.closed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._connections = connections
        self._limits = limits
        self._keepalive: Keepalive | None = None
        self._sender = Sender(self._loop)
        self._reader = FrameReader(self._take)
        self._incoming = Incoming(self._parse)
        self._decoder = HeadDecoder()
        self._flood_limit = FloodLimit()
        pace = Pace(self._incoming.hold, self._incoming.release)
        self._calls = Calls(methods, self._sender, memory, pace=pace, on_empty=self._close_if_leaving)
        self._last_stream = 0
        self._last_taken = 0  # the stream in a GOAWAY, which may not grow after the first one
        self._received = 0  # bytes of data not yet returned to the connection's window
        self._send_window = frames.DEFAULT_WINDOW  # of a new call
        self._is_leaving = False  # takes no new calls
        self._is_over = False  # data that the client still sends is ignored
        self._preface_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._sender.transport = transport  # type: ignore[assignment]  # a TCP transport, of any event loop
        self._incoming.transport = self._sender.transport
        self._connections.add(self)
        self._preface_timer = self._loop.call_later(PREFACE_TIMEOUT_S, self._give_up)
        self._keepalive = Keepalive(self._limits, self)
        self._sender.write(OUR_SETTINGS + frames.window_update(0, CONNECTION_WINDOW - frames.DEFAULT_WINDOW))

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self.closed.set()
        if self._preface_timer is not None and self._keepalive is not None:
            self._preface_timer.cancel()
            self._keepalive.stop()
        self._sender.transport = None
        self._incoming.drop()
        self._is_over = True
        self._calls.cancel_all()

    def pause_writing(self) -> None:
        self._sender.is_paused = True

    def resume_writing(self) -> None:
        self._sender.resume()

    def data_received(self, data: bytes) -> None:
        if self._is_over or self._keepalive is None:
            return
        self._keepalive.heard()
        self._incoming.take(data)

    def _parse(self, data: bytes | memoryview) -> None:
        try:
            self._reader.feed(data)
        except ConnectionFailed as failure:
            self._fail(failure)

    @property
    def peer(self) -> str:
        """The client's address."""
        transport = self._sender.transport
        return "" if transport is None else str(transport.get_extra_info("peername"))

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def ping(self) -> None:
        self._sender.write(frame(frames.PING, 0, 0, OUR_PING))

    def leave(self) -> None:
        """Take no new calls; running ones may finish."""
        self._is_leaving = True
        self._sender.write(self._goaway(frames.NO_ERROR))
        if not self._calls:
            self.close()

    def close(self) -> None:
        """Cancel running calls, send pending frames, and wait a moment for the client to disconnect."""
        self._is_over = True
        self._incoming.drop()
        self._calls.cancel_all()
        self._sender.finish()
        if self._sender.transport is not None:
            self._loop.call_later(CLOSE_TIMEOUT_S, self._sender.transport.abort)

    def abort(self, reason: str = "the server is shutting down") -> None:
        """End running calls and close, whether or not the client reads."""
        for call in self._calls:
            call.finish(StatusCode.UNAVAILABLE, reason)
        self._calls.cancel_all()
        self._sender.flush()
        if self._sender.transport is not None:
            self._sender.transport.abort()

    def _close_if_leaving(self) -> None:
        if self._is_leaving and not self._is_over:
            self.close()

    def _goaway(self, code: int, text: str = "") -> bytes:
        return frame(frames.GOAWAY, 0, 0, frames.WORD.pack(self._last_taken) + frames.WORD.pack(code) + text.encode())

    def _fail(self, failure: ConnectionFailed) -> None:
        logger.info("a connection is closed: %s", failure)
        self._sender.write(self._goaway(failure.code, str(failure)))
        self.close()

    def _give_up(self) -> None:
        if not self._reader.has_preface and self._sender.transport is not None:
            self._sender.transport.abort()

    # frames

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._sender.check_read()
        if kind == frames.DATA:
            self._take_data(flags, stream, payload)
        elif kind == frames.HEADERS:
            if len(payload) > LARGE_BLOCK_BYTES:
                self._flood_limit.spend("large headers", cost=len(payload) // 1024)
            self._take_head(flags, stream, self._decoder.decode(payload))
        elif kind == frames.WINDOW_UPDATE:
            self._take_window(stream, frames.word(payload))
        elif kind == frames.SETTINGS:
            self._take_settings(flags, payload)
        elif kind == frames.PING:
            if not flags & frames.ACK:
                self._sender.write(frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.RST_STREAM:
            self._take_reset(stream)
        elif kind == frames.PUSH_PROMISE:
            raise ConnectionFailed(frames.PROTOCOL_ERROR, "clients must not send PUSH_PROMISE")
        else:
            self._flood_limit.spend("frames without effect")

    def _check_known(self, stream: int) -> None:
        if stream > self._last_stream or stream % 2 == 0:
            raise ConnectionFailed(frames.PROTOCOL_ERROR, f"stream {stream} was never opened")

    def _take_data(self, flags: int, stream: int, payload: bytes) -> None:
        self._check_known(stream)
        data, is_last = frames.without_padding(flags, payload), bool(flags & frames.END_STREAM)
        if not data and not is_last:
            self._flood_limit.spend("empty DATA frames")
        self._received += len(payload)
        if self._received >= CONNECTION_WINDOW // 2:
            self._sender.write(frames.window_update(0, self._received))
            self._received = 0
        call = self._calls.running(stream)
        if call is None:
            return  # it has ended here, and data still in flight is ignored
        if call.has_ended:
            raise ConnectionFailed(frames.STREAM_CLOSED, f"data after the end of stream {stream}")
        self._calls.receive(call, data, size=len(payload), is_last=is_last)

    def _take_head(self, flags: int, stream: int, head: RequestHead) -> None:
        if stream % 2 == 0:
            raise ConnectionFailed(frames.PROTOCOL_ERROR, f"stream {stream} cannot be opened by a client")
        if stream <= self._last_stream:
            self._take_trailers(flags, stream)
            return
        self._last_stream = stream
        self._last_taken = self._last_taken if self._is_leaving else stream
        if self._is_leaving or len(self._calls) >= MAX_CALLS:
            self._sender.write(frames.reset(stream, frames.REFUSED_STREAM))
        elif head.fault:
            logger.info("a request is malformed: %s", head.fault)
            self._sender.write(frames.reset(stream, frames.PROTOCOL_ERROR))
        elif not head.is_grpc:
            self._sender.write(
                frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream, UNSUPPORTED_MEDIA_TYPE)
            )
        else:
            if head.refusal is not None:
                self._flood_limit.spend("calls with invalid headers")
            self._calls.open(stream, head, self._send_window, has_ended=bool(flags & frames.END_STREAM))

    def _take_trailers(self, flags: int, stream: int) -> None:
        """Take the trailers that end a client's data. Headers of a call that has ended here are ignored."""
        call = self._calls.running(stream)
        if call is None:
            self._flood_limit.spend("header blocks for ended calls")
            return
        if call.has_ended:
            raise ConnectionFailed(frames.STREAM_CLOSED, f"headers after the end of stream {stream}")
        if flags & frames.END_STREAM:
            self._calls.end(call)
        else:
            self._sender.write(frames.reset(stream, frames.PROTOCOL_ERROR))
            self._calls.cancel(call)

    def _take_window(self, stream: int, increment: int) -> None:
        if increment == 0:
            raise ConnectionFailed(frames.PROTOCOL_ERROR, "a window update of zero")
        if stream == 0:
            self._sender.open_window(increment)
            return
        self._check_known(stream)
        call = self._calls.get(stream)
        if call is not None:
            call.send_window += increment
            if call.send_window > frames.LARGEST_WINDOW:
                raise ConnectionFailed(frames.FLOW_CONTROL_ERROR, f"the window of stream {stream} is too large")
            self._sender.wake(stream)

    def _take_settings(self, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            return
        self._flood_limit.spend("settings")
        window = self._send_window
        for name, value in frames.SETTING.iter_unpack(payload):
            if name == frames.INITIAL_WINDOW_SIZE:
                if value > frames.LARGEST_WINDOW:
                    raise ConnectionFailed(frames.FLOW_CONTROL_ERROR, "the initial window is too large")
                window = value
            elif name == frames.MAX_FRAME_SIZE:
                if not frames.DEFAULT_MAX_FRAME <= value <= frames.LARGEST_FRAME:
                    raise ConnectionFailed(frames.PROTOCOL_ERROR, f"invalid value of MAX_FRAME_SIZE: {value}")
                self._sender.max_frame = value
            elif name == frames.ENABLE_PUSH and value > 1:
                raise ConnectionFailed(frames.PROTOCOL_ERROR, f"invalid value of ENABLE_PUSH: {value}")
        if window != self._send_window:  # only the last value of a frame counts
            self._resize_windows(window)
        self._sender.write(frame(frames.SETTINGS, frames.ACK, 0))

    def _resize_windows(self, size: int) -> None:
        """Resize the windows of all calls. A client may do it less often the more calls it has."""
        self._flood_limit.spend("resized windows", cost=len(self._calls) // CALLS_PER_COST)
        for call in self._calls:
            call.send_window += size - self._send_window
            if call.send_window > frames.LARGEST_WINDOW:
                raise ConnectionFailed(frames.FLOW_CONTROL_ERROR, f"the window of stream {call.stream} is too large")
        self._send_window = size
        self._sender.wake_stalled()

    def _take_reset(self, stream: int) -> None:
        self._check_known(stream)
        call = self._calls.get(stream)
        if call is not None:
            self._flood_limit.spend("cancelled calls")
            self._calls.cancel(call)
