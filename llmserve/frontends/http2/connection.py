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
from llmserve.frontends.http2.sender import CallClosed, Sender

MAX_CALLS = 4096  # at the same time
MAX_FRAME = 1024 * 1024
CONNECTION_WINDOW = 64 * 1024 * 1024
PREFACE_TIMEOUT_S = 20.0

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
        self._decoder = HeadDecoder()
        self._calls: dict[int, Call] = {}
        self._buffer = bytearray()
        self._has_preface = False
        self._block: tuple[int, int, bytearray] | None = None  # stream, flags, headers whose end has not come
        self._last_stream = 0
        self._received = 0  # bytes of data that the connection's window does not have back
        self._send_window = h2.DEFAULT_WINDOW  # of a new call
        self._is_leaving = False  # takes no new calls
        self._preface_timer = self._loop.call_later(PREFACE_TIMEOUT_S, self._give_up)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._sender.transport = transport  # type: ignore[assignment]  # a TCP transport, whoever implements it
        self._connections.add(self)
        self._sender.write(OUR_SETTINGS + h2.window_update(0, CONNECTION_WINDOW - h2.DEFAULT_WINDOW))

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self.closed.set()
        self._preface_timer.cancel()
        self._sender.transport = None
        self._cancel_all()

    def pause_writing(self) -> None:
        self._sender.is_paused = True

    def resume_writing(self) -> None:
        self._sender.resume()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            if self._has_preface or self._take_preface():
                self._take_frames()
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

    def abort(self) -> None:
        """Cancel what runs and close, whether the client reads or not."""
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
        self._buffer.clear()
        self._sender.write(self._goaway(failure.code, str(failure)))
        self.close()

    def _give_up(self) -> None:
        if not self._has_preface and self._sender.transport is not None:
            self._sender.transport.abort()

    # frames

    def _take_preface(self) -> bool:
        start = bytes(self._buffer[: len(h2.PREFACE)])
        if not h2.PREFACE.startswith(start):
            raise ConnectionFailed(h2.PROTOCOL_ERROR, "this is a port for gRPC over HTTP/2")
        if len(start) < len(h2.PREFACE):
            return False
        del self._buffer[: len(h2.PREFACE)]
        self._preface_timer.cancel()
        self._has_preface = True
        return True

    def _take_frames(self) -> None:
        buffer, offset = self._buffer, 0
        while len(buffer) - offset >= h2.HEAD.size:
            high, low, kind, flags, stream = h2.HEAD.unpack_from(buffer, offset)
            length = high << 8 | low
            if length > MAX_FRAME:
                raise ConnectionFailed(h2.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            end = offset + h2.HEAD.size + length
            if end > len(buffer):
                break
            payload = bytes(buffer[offset + h2.HEAD.size : end])
            offset = end
            self._take(kind, flags, stream & h2.LARGEST_WINDOW, payload)
        del buffer[:offset]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if (self._block is not None) != (kind == h2.CONTINUATION):
            raise ConnectionFailed(h2.PROTOCOL_ERROR, "headers are interrupted, or continued without a beginning")
        if kind == h2.DATA:
            self._take_data(flags, stream, payload)
        elif kind == h2.HEADERS:
            block = h2.without_priority(flags, h2.without_padding(flags, payload))
            self._take_block(flags, stream, block)
        elif kind == h2.CONTINUATION:
            self._take_continuation(flags, stream, payload)
        elif kind == h2.WINDOW_UPDATE:
            self._take_window(stream, h2.word(payload, "WINDOW_UPDATE"))
        elif kind == h2.SETTINGS:
            self._take_settings(flags, stream, payload)
        elif kind == h2.PING:
            self._take_ping(flags, stream, payload)
        elif kind == h2.RST_STREAM:
            self._take_reset(stream, payload)
        elif kind == h2.PUSH_PROMISE:
            raise ConnectionFailed(h2.PROTOCOL_ERROR, "clients do not push")

    def _check_known(self, stream: int) -> None:
        if stream == 0 or stream > self._last_stream or stream % 2 == 0:
            raise ConnectionFailed(h2.PROTOCOL_ERROR, f"there has been no stream {stream}")

    def _take_data(self, flags: int, stream: int, payload: bytes) -> None:
        self._check_known(stream)
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
            call.receive(h2.without_padding(flags, payload), len(payload))
        except BadMessage as problem:
            self._refuse(call, problem)
            return
        if flags & h2.END_STREAM:
            self._take_end(call)

    def _take_block(self, flags: int, stream: int, block: bytes) -> None:
        if flags & h2.END_HEADERS:
            self._take_head(flags, stream, self._decoder.decode(block))
        else:
            self._block = (stream, flags, bytearray(block))

    def _take_continuation(self, flags: int, stream: int, payload: bytes) -> None:
        assert self._block is not None
        begun, first_flags, block = self._block
        block += payload
        if stream != begun or len(block) > MAX_LIST_BYTES:
            raise ConnectionFailed(h2.ENHANCE_YOUR_CALM, "headers without an end, or of two streams at a time")
        if flags & h2.END_HEADERS:
            self._block = None
            self._take_head(first_flags, stream, self._decoder.decode(bytes(block)))

    def _take_head(self, flags: int, stream: int, head: RequestHead) -> None:
        if stream <= self._last_stream:  # trailers of a call, or headers of one that has ended here
            self._check_known(stream)
            call = self._calls.get(stream)
            if call is not None and flags & h2.END_STREAM:
                self._take_end(call)
            return
        if stream % 2 == 0:
            raise ConnectionFailed(h2.PROTOCOL_ERROR, f"stream {stream} is not a client's")
        self._last_stream = stream
        if self._is_leaving or len(self._calls) >= MAX_CALLS:
            self._sender.write_answer(h2.reset(stream, h2.REFUSED_STREAM))
        elif not head.is_grpc:
            ending = h2.END_HEADERS | h2.END_STREAM
            self._sender.write_answer(frame(h2.HEADERS, ending, stream, UNSUPPORTED_MEDIA_TYPE))
        else:
            self._open(flags, stream, head)

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

    def _take_settings(self, flags: int, stream: int, payload: bytes) -> None:
        if stream != 0 or len(payload) % h2.SETTING.size or (flags & h2.ACK and payload):
            raise ConnectionFailed(h2.FRAME_SIZE_ERROR, "settings in a form that they cannot have")
        if flags & h2.ACK:
            return
        for name, value in h2.SETTING.iter_unpack(payload):
            if name == h2.INITIAL_WINDOW_SIZE:
                self._resize_windows(value)
            elif name == h2.MAX_FRAME_SIZE:
                if not h2.DEFAULT_MAX_FRAME <= value <= h2.LARGEST_FRAME:
                    raise ConnectionFailed(h2.PROTOCOL_ERROR, f"frames of at most {value} bytes")
                self._sender.max_frame = value
        self._sender.write_answer(frame(h2.SETTINGS, h2.ACK, 0))

    def _resize_windows(self, size: int) -> None:
        if size > h2.LARGEST_WINDOW:
            raise ConnectionFailed(h2.FLOW_CONTROL_ERROR, "the initial window is too large")
        for call in self._calls.values():
            call.send_window += size - self._send_window
        self._send_window = size
        self._sender.wake()

    def _take_ping(self, flags: int, stream: int, payload: bytes) -> None:
        if stream != 0 or len(payload) != 8:
            raise ConnectionFailed(h2.FRAME_SIZE_ERROR, "a ping in a form that it cannot have")
        if not flags & h2.ACK:
            self._sender.write_answer(frame(h2.PING, h2.ACK, 0, payload))

    def _take_reset(self, stream: int, payload: bytes) -> None:
        h2.word(payload, "RST_STREAM")
        self._check_known(stream)
        call = self._calls.get(stream)
        if call is not None:
            call.cancel()
            self._sender.wake()
            if call.task is None:
                self._forget(call)

    # calls

    def _open(self, flags: int, stream: int, head: RequestHead) -> None:
        method = self._methods.get(head.path)
        parse = bytes if method is None else method.parse
        call = Call(self._sender, stream, head, parse=parse, send_window=self._send_window)
        if flags & h2.END_STREAM:
            call.end()
        if method is None:
            call.finish(StatusCode.UNIMPLEMENTED, "Method not found!")
            return
        self._calls[stream] = call
        if method.streams:
            call.task = self._loop.create_task(self._run(call, method.handle(call)))
        elif call.has_ended:
            self._refuse(call, BadMessage(StatusCode.INTERNAL, "the call has no message"))

    def _take_end(self, call: Call) -> None:
        call.end()
        if call.task is not None:
            return
        if call.num_messages != 1:
            problem = f"the call has {call.num_messages} complete messages instead of one"
            self._refuse(call, BadMessage(StatusCode.INTERNAL, problem))
            return
        call.task = self._loop.create_task(self._run(call, self._answer(call)))

    async def _answer(self, call: Call) -> None:
        request = call.take()
        reply = await self._methods[call.head.path].handle(request, call)
        await call.answer(reply)

    async def _run(self, call: Call, work: Awaitable[Any]) -> None:
        try:
            await work
            call.finish()
        except Aborted as ending:
            call.finish(ending.code, ending.details)
        except BadMessage as problem:
            call.finish(problem.code, str(problem))
        except CallClosed:
            pass
        except Exception as error:  # border: a fault of ours is this call's status
            if isinstance(error, ExceptionGroup) and (bad := error.subgroup(BadMessage)) is not None:  # of a task group
                call.finish(StatusCode.INTERNAL, str(bad.exceptions[0]))
            else:
                logger.exception("%s failed", call.head.path)
                call.finish(StatusCode.INTERNAL, f"internal error: {error!r}")
        finally:
            self._forget(call)

    def _refuse(self, call: Call, problem: BadMessage) -> None:
        call.finish(problem.code, str(problem))
        if call.task is None:
            self._forget(call)
        else:
            call.task.cancel()

    def _forget(self, call: Call) -> None:
        self._calls.pop(call.stream, None)
        call.run_callbacks()
        if self._is_leaving and not self._calls:
            self.close()
