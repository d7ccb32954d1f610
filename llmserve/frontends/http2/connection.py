"""One connection: frames to calls. Everything happens on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpc import StatusCode

from llmserve.frontends.http2 import frames as h2
from llmserve.frontends.http2.call import WINDOW, Aborted, Call
from llmserve.frontends.http2.frames import ConnectionFailed, frame
from llmserve.frontends.http2.headers import MAX_LIST_BYTES, UNSUPPORTED_MEDIA_TYPE, HeadDecoder, RequestHead
from llmserve.frontends.http2.messages import BadMessage
from llmserve.frontends.http2.patience import Patience
from llmserve.frontends.http2.reader import MAX_FRAME, FrameReader
from llmserve.frontends.http2.sender import CallClosed, Sender

MAX_CALLS = 4096  # at the same time
CONNECTION_WINDOW = 64 * 1024 * 1024
PREFACE_TIMEOUT_S = 20.0
CLOSE_TIMEOUT_S = 2.0  # for a client to read what it has been told at the end
DEADLINE_GRACE_S = 0.5  # for a handler to end by itself when its client's time is over

OUR_SETTINGS = h2.settings({
    h2.MAX_CONCURRENT_STREAMS: MAX_CALLS, h2.INITIAL_WINDOW_SIZE: WINDOW, h2.MAX_FRAME_SIZE: MAX_FRAME,
    h2.MAX_HEADER_LIST_SIZE: MAX_LIST_BYTES,
})  # fmt: skip

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Method:
    """`handle(request, context)` gives the answer; of a streaming method, `handle(context)` does everything."""

    handle: Callable[..., Awaitable[Any]]
    parse: Callable[[bytes], Any]
    streams: bool = False


class Connection(asyncio.Protocol):
    def __init__(self, methods: Mapping[str, Method], connections: set[Connection]) -> None:
        """`methods` by path; `connections` holds this one for as long as it lives."""
        self.closed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._methods = methods
        self._connections = connections
        self._sender = Sender(self._loop)
        self._reader = FrameReader(self._take)
        self._decoder = HeadDecoder()
        self._patience = Patience()
        self._calls: dict[int, Call] = {}
        self._last_stream = 0
        self._received = 0  # bytes of data that the connection's window does not have back
        self._send_window = h2.DEFAULT_WINDOW  # of a new call
        self._is_leaving = False  # takes no new calls
        self._has_failed = False
        self._preface_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._sender.transport = transport  # type: ignore[assignment]  # a TCP transport, whoever implements it
        self._connections.add(self)
        self._preface_timer = self._loop.call_later(PREFACE_TIMEOUT_S, self._give_up)
        self._sender.write(OUR_SETTINGS + h2.window_update(0, CONNECTION_WINDOW - h2.DEFAULT_WINDOW))

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self.closed.set()
        if self._preface_timer is not None:
            self._preface_timer.cancel()
        self._sender.transport = None
        self._cancel_all()

    def pause_writing(self) -> None:
        self._sender.is_paused = True

    def resume_writing(self) -> None:
        self._sender.resume()

    def data_received(self, data: bytes) -> None:
        if self._has_failed:
            return
        try:
            self._reader.feed(data)
        except ConnectionFailed as failure:
            self._fail(failure)

    def leave(self) -> None:
        """Take no new calls; those that run may end."""
        self._is_leaving = True
        self._sender.write(self._goaway(h2.NO_ERROR))
        if not self._calls:
            self.close()

    def close(self) -> None:
        """Cancel what runs, send what is to be sent, and close."""
        self._cancel_all()
        self._sender.flush()
        if self._sender.transport is not None:
            self._sender.transport.close()
            self._abort_soon()

    def abort(self) -> None:
        """End what runs and close, whether the client reads or not."""
        for call in self._calls.values():
            call.finish(StatusCode.UNAVAILABLE, "the server is shutting down")
        self.close()
        if self._sender.transport is not None:
            self._sender.transport.abort()

    def _cancel_all(self) -> None:
        for call in self._calls.values():
            call.cancel()
        self._sender.wake()

    def _goaway(self, code: int, text: str = "") -> bytes:
        return frame(h2.GOAWAY, 0, 0, h2.WORD.pack(self._last_stream) + h2.WORD.pack(code) + text.encode())

    def _fail(self, failure: ConnectionFailed) -> None:
        logger.info("a connection is closed: %s", failure)
        self._has_failed = True
        self._cancel_all()
        self._sender.write(self._goaway(failure.code, str(failure)))
        self._sender.finish()
        self._abort_soon()

    def _abort_soon(self) -> None:
        if self._sender.transport is not None:
            self._loop.call_later(CLOSE_TIMEOUT_S, self._sender.transport.abort)

    def _give_up(self) -> None:
        if not self._reader.has_preface and self._sender.transport is not None:
            self._sender.transport.abort()

    # frames

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._sender.check_read()
        if kind == h2.DATA:
            self._take_data(flags, stream, payload)
        elif kind == h2.HEADERS:
            self._take_head(flags, stream, self._decoder.decode(payload))
        elif kind == h2.WINDOW_UPDATE:
            self._take_window(stream, h2.word(payload))
        elif kind == h2.SETTINGS:
            self._take_settings(flags, payload)
        elif kind == h2.PING:
            if not flags & h2.ACK:
                self._sender.write(frame(h2.PING, h2.ACK, 0, payload))
        elif kind == h2.RST_STREAM:
            self._take_reset(stream)
        elif kind == h2.PUSH_PROMISE:
            raise ConnectionFailed(h2.PROTOCOL_ERROR, "clients do not push")
        else:
            self._patience.spend("frames without a use")

    def _check_known(self, stream: int) -> None:
        if stream > self._last_stream or stream % 2 == 0:
            raise ConnectionFailed(h2.PROTOCOL_ERROR, f"there has been no stream {stream}")

    def _take_data(self, flags: int, stream: int, payload: bytes) -> None:
        self._check_known(stream)
        data, is_last = h2.without_padding(flags, payload), bool(flags & h2.END_STREAM)
        if not data and not is_last:
            self._patience.spend("empty pieces of messages")
        self._received += len(payload)
        if self._received >= CONNECTION_WINDOW // 2:
            self._sender.write(h2.window_update(0, self._received))
            self._received = 0
        call = self._calls.get(stream)
        if call is None or call.is_closed:
            return  # it has ended here, and what was still on its way is of no use
        if call.has_ended:
            raise ConnectionFailed(h2.STREAM_CLOSED, f"data after the end of stream {stream}")
        try:
            call.receive(data, len(payload))
            if call.num_messages > 1 and call.task is None:
                raise BadMessage(StatusCode.INTERNAL, "the call has more than one message")
        except BadMessage as problem:
            self._refuse(call, problem)
            return
        if is_last:
            self._take_end(call)

    def _take_head(self, flags: int, stream: int, head: RequestHead) -> None:
        if stream % 2 == 0:
            raise ConnectionFailed(h2.PROTOCOL_ERROR, f"stream {stream} is not a client's")
        if stream <= self._last_stream:
            self._take_trailers(flags, stream)
            return
        self._last_stream = stream
        if self._is_leaving or len(self._calls) >= MAX_CALLS:
            self._sender.write(h2.reset(stream, h2.REFUSED_STREAM))
        elif head.fault:
            logger.info("a request is malformed: %s", head.fault)
            self._sender.write(h2.reset(stream, h2.PROTOCOL_ERROR))
        elif not head.is_grpc:
            self._sender.write(frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, stream, UNSUPPORTED_MEDIA_TYPE))
        else:
            self._open(flags, stream, head)

    def _take_trailers(self, flags: int, stream: int) -> None:
        """The end of what a client sends; or headers of a call that has ended here, which are of no use."""
        call = self._calls.get(stream)
        if call is None or call.is_closed:
            return
        if call.has_ended:
            raise ConnectionFailed(h2.STREAM_CLOSED, f"headers after the end of stream {stream}")
        if flags & h2.END_STREAM:
            self._take_end(call)
        else:
            self._sender.write(h2.reset(stream, h2.PROTOCOL_ERROR))
            self._cancel(call)

    def _take_window(self, stream: int, increment: int) -> None:
        if increment == 0:
            raise ConnectionFailed(h2.PROTOCOL_ERROR, "a window that opens by nothing")
        if stream == 0:
            self._sender.open_window(increment)
            return
        self._check_known(stream)
        call = self._calls.get(stream)
        if call is not None:
            call.send_window += increment
            if call.send_window > h2.LARGEST_WINDOW:
                raise ConnectionFailed(h2.FLOW_CONTROL_ERROR, f"the window of stream {stream} is too large")
            self._sender.wake()

    def _take_settings(self, flags: int, payload: bytes) -> None:
        if flags & h2.ACK:
            return
        self._patience.spend("settings")
        for name, value in h2.SETTING.iter_unpack(payload):
            if name == h2.INITIAL_WINDOW_SIZE:
                self._resize_windows(value)
            elif name == h2.MAX_FRAME_SIZE:
                if not h2.DEFAULT_MAX_FRAME <= value <= h2.LARGEST_FRAME:
                    raise ConnectionFailed(h2.PROTOCOL_ERROR, f"frames of at most {value} bytes")
                self._sender.max_frame = value
            elif name == h2.ENABLE_PUSH and value > 1:
                raise ConnectionFailed(h2.PROTOCOL_ERROR, f"pushing that is neither on nor off: {value}")
        self._sender.write(frame(h2.SETTINGS, h2.ACK, 0))

    def _resize_windows(self, size: int) -> None:
        if size > h2.LARGEST_WINDOW:
            raise ConnectionFailed(h2.FLOW_CONTROL_ERROR, "the initial window is too large")
        for call in self._calls.values():
            call.send_window += size - self._send_window
            if call.send_window > h2.LARGEST_WINDOW:
                raise ConnectionFailed(h2.FLOW_CONTROL_ERROR, f"the window of stream {call.stream} is too large")
        self._send_window = size
        self._sender.wake()

    def _take_reset(self, stream: int) -> None:
        self._check_known(stream)
        call = self._calls.get(stream)
        if call is not None:
            self._patience.spend("cancelled calls")
            self._cancel(call)

    # calls

    def _open(self, flags: int, stream: int, head: RequestHead) -> None:
        method = self._methods.get(head.path)
        parse = bytes if method is None else method.parse
        call = Call(self._sender, stream, head, parse=parse, send_window=self._send_window)
        if flags & h2.END_STREAM:
            call.end()
        if head.refusal is not None:
            call.finish(head.refusal.code, str(head.refusal))
            return
        if method is None:
            call.finish(StatusCode.UNIMPLEMENTED, "Method not found!")
            return
        self._calls[stream] = call
        if head.timeout_s is not None:
            late = BadMessage(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            call.expiry = self._loop.call_later(head.timeout_s + DEADLINE_GRACE_S, self._refuse, call, late)
        if method.streams:
            self._start(call)
        elif call.has_ended:
            self._refuse(call, BadMessage(StatusCode.INTERNAL, "the call has no message"))

    def _start(self, call: Call) -> None:
        call.task = self._loop.create_task(self._run(call))
        call.task.add_done_callback(lambda _: self._forget(call))  # not at its end: one cancelled at once has none

    def _take_end(self, call: Call) -> None:
        call.end()
        if call.task is not None:
            return
        if call.num_messages != 1:
            problem = f"the call has {call.num_messages} complete messages instead of one"
            self._refuse(call, BadMessage(StatusCode.INTERNAL, problem))
            return
        self._start(call)

    async def _handle(self, call: Call) -> None:
        method = self._methods[call.head.path]
        if method.streams:
            await method.handle(call)
            call.finish()
        else:
            await call.answer(await method.handle(call.take(), call))

    async def _run(self, call: Call) -> None:
        try:
            await self._handle(call)
        except Aborted as ending:
            call.finish(ending.code, ending.details)
        except BadMessage as problem:
            call.finish(problem.code, str(problem))
        except CallClosed:
            pass
        except asyncio.CancelledError:
            call.finish(StatusCode.CANCELLED, "the server has cancelled the call")  # unless the client has
            raise
        except Exception as error:  # border: a fault of ours is this call's status
            if isinstance(error, ExceptionGroup) and (bad := error.subgroup(BadMessage)) is not None:  # of a task group
                call.finish(StatusCode.INTERNAL, str(bad.exceptions[0]))
            else:
                logger.exception("%s failed", call.head.path)
                call.finish(StatusCode.INTERNAL, f"internal error: {error!r}")

    def _refuse(self, call: Call, problem: BadMessage) -> None:
        call.finish(problem.code, str(problem))
        self._cancel(call)

    def _cancel(self, call: Call) -> None:
        call.cancel()
        self._sender.wake()
        if call.task is None:
            self._forget(call)

    def _forget(self, call: Call) -> None:
        self._calls.pop(call.stream, None)
        call.forget()
        if self._is_leaving and not self._calls:
            self.close()
