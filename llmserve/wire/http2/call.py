"""One call, from its head to its trailers. It is the context that handlers receive."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

from google.protobuf.message import DecodeError
from grpc import StatusCode

from llmserve.errors import ResourceExhausted
from llmserve.wire.event_loop import INLINE_BYTES, beside_loop
from llmserve.wire.http2 import frames
from llmserve.wire.http2.frames import ConnectionFailed, frame
from llmserve.wire.http2.headers import COMPRESSED_RESPONSE, RESPONSE, RequestHead, trailers, with_metadata
from llmserve.wire.http2.messages import (
    PREFIX,
    Arrived,
    Assembler,
    BadMessage,
    Compressed,
    Compressor,
    LargeMessage,
    Message,
    framed,
    framed_parts,
)
from llmserve.wire.http2.method import Method
from llmserve.wire.http2.sender import CallClosed, Sender
from llmserve.wire.pieces import Pieces, copied
from llmserve.wire.request_memory import RequestMemory, Share

OK = trailers(0)
WINDOW = 4 * 1024 * 1024  # bytes that a client may send before they are read
Result = TypeVar("Result")


class Aborted(Exception):
    """Raised by a handler to end its call with a status."""

    def __init__(self, code: StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class ProtoMessage(Protocol):
    def SerializeToString(self) -> bytes: ...  # noqa: N802  # protobuf's


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a stream, and the memory that it uses until the share is released."""

    message: Any
    share: Share


class Call:
    __slots__ = (
        "_assembler", "_callbacks", "_compressor", "_deadline", "_has_begun", "_heard_at", "_held", "_memory",
        "_messages", "_method", "_reader", "_sender", "_window", "answer_metadata", "context", "has_ended",
        "head", "is_closed", "is_started", "send_window", "share", "status", "stream", "task",
    )  # fmt: skip

    def __init__(
        self, sender: Sender, stream: int, head: RequestHead, *, method: Method, memory: RequestMemory, send_window: int
    ) -> None:
        self.stream = stream
        self.head = head
        self.send_window = send_window  # bytes that the client lets us send
        self.has_ended = False  # the client has sent everything
        self.is_closed = False  # nothing more can be sent
        self.is_started = False  # its handler runs, or is about to
        self.task: asyncio.Task[None] | None = None
        self.answer_metadata: Sequence[tuple[str, str]] = ()
        self.context: Context | None = None
        self.status: StatusCode | None = None  # None: not known yet
        self._sender = sender
        self._method = method
        self._memory = memory
        self.share = memory.share()  # for received data; in a stream, for data not read yet
        self._assembler = Assembler(head.encoding, min(method.largest_bytes, memory.each_bytes))
        self._messages: deque[Arrived | Compressed] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._window = WINDOW
        self._heard_at = time.monotonic()
        self._held = 0  # bytes received but not yet returned to the client's window
        self._callbacks: list[Callable[[Any], None]] = []
        self._compressor: Compressor | None = None
        self._has_begun = False  # the response's head is sent
        self._deadline = None if head.timeout_s is None else time.monotonic() + head.timeout_s

    @property
    def path(self) -> str:
        return self.head.path

    # what handlers use

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None without one."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self.head.metadata

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """`callback` is called with this call when it is over, however it ends."""
        self._callbacks.append(callback)

    async def abort(self, code: StatusCode, details: str = "") -> NoReturn:
        raise Aborted(code, details)

    async def read(self) -> Received | None:
        """The next message, whose share the caller must release; None after the client's last one."""
        while not self._messages:
            if self.has_ended:
                if self._assembler.is_in_message:
                    raise BadMessage(StatusCode.INTERNAL, "the last message is truncated")
                return None
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        first = self._messages.popleft()
        share = self.share.split(PREFIX.size + len(first))
        try:
            message = await self._parsed(first, share)
        except BaseException:
            share.release()
            raise
        if not self._messages:
            self._give_back()
        return Received(message, share)

    def compress(self, level: int) -> None:
        """Compress messages if the client supports it; `level` is zlib's. Call it before the first `write`."""
        self._compressor = Compressor.accepted(self.head.accepted, level)

    async def write(self, message: ProtoMessage | LargeMessage) -> None:
        """Send a message; returns when the connection has taken it. Raises `CallClosed` if the call is over."""
        await self._send(message, b"")

    # what the connection uses

    @property
    def num_messages(self) -> int:
        return len(self._messages)

    def silent_s(self, now_s: float) -> float:
        """Seconds without data while a message is due from the client; `now_s` is `time.monotonic()`.

        A message is due if it has begun, or if it is the one message of a unary call.
        """
        owes = self._assembler.is_in_message or (not self.is_started and not self.has_ended)
        is_read_first = self.is_started and self._messages  # until they are read, the client's window may be closed
        if not owes or is_read_first:
            self._heard_at = now_s
        return now_s - self._heard_at

    def take(self) -> Awaitable[Any]:
        """The one message of a unary call, which uses the call's share. Raises `BadMessage`."""
        return self._parsed(self._messages.popleft(), self.share)

    def beside_loop(self, work: Callable[[], Result], share: Share, *, size: int) -> Awaitable[Result]:
        """Do `work` on about `size` bytes: see `event_loop.beside_loop`."""
        return beside_loop(work, size=size, memory=self._memory, share=share)

    async def _parsed(self, message: Arrived | Compressed, share: Share) -> Any:
        parse = self._method.parse
        try:
            if isinstance(message, bytes) and len(message) <= INLINE_BYTES:
                return parse(message)
            plain = await message.plain(self._memory, share) if isinstance(message, Compressed) else message
            if not isinstance(plain, Pieces) and len(plain) <= INLINE_BYTES:
                return parse(bytes(plain))
            return await self._memory.work(lambda: self._parsed_large(plain, share), share)
        except DecodeError as error:
            raise BadMessage(StatusCode.INTERNAL, f"a message is not valid: {error}") from error
        except ResourceExhausted as error:
            raise BadMessage(StatusCode.RESOURCE_EXHAUSTED, str(error)) from error

    def receive(self, data: bytes, size: int) -> None:
        """Take data that used `size` bytes of the window. Raises `BadMessage`."""
        self._window -= size
        if self._window < 0:
            raise ConnectionFailed(
                frames.FLOW_CONTROL_ERROR, f"more data on stream {self.stream} than its window allows"
            )
        try:
            self.share.grow(len(data))
        except ResourceExhausted as error:
            raise BadMessage(StatusCode.RESOURCE_EXHAUSTED, str(error)) from error
        self._held += size
        self._heard_at = time.monotonic()
        self._messages.extend(self._assembler.feed(data))
        if not self._messages:
            self._give_back()  # a message larger than the window could not end otherwise
        self._wake()

    def end(self) -> None:
        """The client has sent its last byte."""
        self.has_ended = True
        self._wake()

    async def answer(self, reply: ProtoMessage | LargeMessage) -> None:
        """Send the one answer of a unary call, and status OK."""
        await self._send(reply, self._last_frames(OK))
        self.status = StatusCode.OK

    def finish(self, code: StatusCode = StatusCode.OK, details: str = "") -> None:
        """Send the status; nothing can be sent after it."""
        if not self.is_closed:
            block = OK if code is StatusCode.OK else trailers(code.value[0], details)
            self._sender.write(self._first_frames() + self._last_frames(block))
            self.is_closed = True
            self.status = code

    def forget(self) -> None:
        """The call is over: run its callbacks and release its memory."""
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)
        self._messages.clear()
        self.share.release()

    def _parsed_large(self, message: Message | Pieces, share: Share) -> Any:
        plain = message.taken() if isinstance(message, Pieces) else message
        large = self._method.parse_large
        return self._method.parse(copied(plain)) if large is None else large(plain, share)

    def _give_back(self) -> None:
        """Return used bytes to the client's window, if they are enough to be worth a frame."""
        if self._held >= WINDOW // 2 and not self.has_ended:
            self._sender.write(frames.window_update(self.stream, self._held))
            self._window += self._held
            self._held = 0

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def _send(self, reply: ProtoMessage | LargeMessage, tail: bytes) -> None:
        if self.is_closed:
            raise CallClosed
        message = reply if isinstance(reply, LargeMessage) else reply.SerializeToString()
        if isinstance(message, bytes) and len(message) <= INLINE_BYTES and self._compressor is None:
            await self._sender.send(self, self._first_frames(), framed(message), tail)
        else:
            await self._send_parts(message, tail)
        if tail:
            self.is_closed = True

    async def _send_parts(self, message: bytes | LargeMessage, tail: bytes) -> None:
        taken = len(message) if len(message) > INLINE_BYTES else 0  # while the client reads it
        self.share.grow(taken)
        try:
            if self._compressor is None:
                *parts, last = framed_parts(message)
            else:
                *parts, last = await self._compressor.framed(message, self._memory, self.share)
            for part in parts:
                await self._sender.send(self, self._first_frames(), part, b"")
            await self._sender.send(self, self._first_frames(), last, tail)
        finally:
            self.share.shrink(taken)

    def _first_frames(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        block = RESPONSE if self._compressor is None else COMPRESSED_RESPONSE[self._compressor.encoding]
        if self.answer_metadata:
            block = with_metadata(block, self.answer_metadata)
        return frame(frames.HEADERS, frames.END_HEADERS, self.stream, block)

    def _last_frames(self, block: bytes) -> bytes:
        """Trailers, and a reset if the client may still send: that data is not needed."""
        last = frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, self.stream, block)
        return last if self.has_ended else last + frames.reset(self.stream, frames.NO_ERROR)
