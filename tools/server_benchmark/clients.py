"""Clients that send the next request as soon as they have an answer, on one connection each, with little CPU time.

The bytes of the request are made once. Answers are counted, not decoded: each gRPC message, HTTP body or server-sent
event is an answer. So the server's cost dominates. HTTP/2 is implemented as far as gRPC needs it, with windows that
never close and headers that are never read.
"""

from __future__ import annotations

import asyncio
import struct
import time
from dataclasses import dataclass, field

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4
INITIAL_WINDOW_SIZE = 4  # a setting
LARGEST_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65535
FRAME = struct.Struct(">HBBBI")  # length in 24 bits, type, flags, stream
ERROR_MESSAGE = b"\x0a"  # the tag of ModelStreamInferResponse.error_message, which comes first
MESSAGE = struct.Struct(">BI")  # gRPC's prefix: compressed, length


@dataclass(slots=True)
class Tally:
    """The results of clients."""

    num_answers: int = 0
    latencies: list[float] = field(default_factory=list)  # seconds from a request to its last answer
    failures: list[str] = field(default_factory=list)


class Client(asyncio.Protocol):
    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.sent_at = 0.0
        self.stopped = False
        self.idle = asyncio.Event()  # set after it has stopped and its last request was answered
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        self.idle.set()
        if not self.stopped:
            self.tally.failures.append(f"the connection was closed: {exc}")

    def send(self) -> None:
        """Sends a request."""

    def answered(self) -> None:
        """Records the end of a request."""
        self.tally.latencies.append(time.perf_counter() - self.sent_at)
        if self.stopped:
            self.idle.set()
        else:
            self.send()


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    length = len(payload)
    return FRAME.pack(length >> 8, length & 0xFF, kind, flags, stream) + payload


def grpc_headers(authority: str, method: str) -> bytes:
    """HPACK without a table: POST and http by their static numbers, other values as plain text."""

    def text(value: str) -> bytes:
        return bytes([len(value)]) + value.encode()

    path, kind = text(f"/inference.GRPCInferenceService/{method}"), text("application/grpc")
    trailers = text("te") + text("trailers")
    return b"\x83\x86\x04" + path + b"\x01" + text(authority) + b"\x0f\x10" + kind + b"\x00" + trailers


class GrpcClient(Client):
    def __init__(self, tally: Tally, headers: bytes, message: bytes) -> None:
        super().__init__(tally)
        self._headers = headers
        self._body = MESSAGE.pack(0, len(message)) + message
        self._stream = -1
        self._buffer = bytearray()
        self._partial = b""
        self._num_messages = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        window = struct.pack(">HI", INITIAL_WINDOW_SIZE, LARGEST_WINDOW)
        more = struct.pack(">I", LARGEST_WINDOW - DEFAULT_WINDOW)
        transport.write(PREFACE + frame(SETTINGS, 0, 0, window) + frame(WINDOW_UPDATE, 0, 0, more))
        super().connection_made(transport)

    def send(self) -> None:
        assert self.transport is not None
        self._stream += 2
        self._num_messages = 0
        self.sent_at = time.perf_counter()
        self.transport.write(
            frame(HEADERS, END_HEADERS, self._stream, self._headers) + frame(DATA, END_STREAM, self._stream, self._body)
        )

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        buffer, offset = self._buffer, 0
        while len(buffer) - offset >= FRAME.size:
            high, low, kind, flags, _ = FRAME.unpack_from(buffer, offset)
            end = offset + FRAME.size + (high << 8 | low)
            if end > len(buffer):
                break
            self._received(kind, flags, bytes(buffer[offset + FRAME.size : end]))
            offset = end
        del buffer[:offset]

    def _received(self, kind: int, flags: int, payload: bytes) -> None:
        assert self.transport is not None
        if kind == DATA:
            self._count(payload)
        elif kind == SETTINGS and not flags & ACK:
            self.transport.write(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.transport.write(frame(PING, ACK, 0, payload))
        elif kind in (RST_STREAM, GOAWAY):
            self.tally.failures.append(f"frame {kind}: {payload!r}")
        if kind in (DATA, HEADERS) and flags & END_STREAM:
            if not self._num_messages:
                self.tally.failures.append("a request without an answer")
            self.answered()

    def check(self, message: bytes) -> None:
        """Records a message that is an error."""

    def _count(self, payload: bytes) -> None:
        """Counts complete messages in data that arrives in pieces of any size."""
        data, offset = self._partial + payload, 0
        while len(data) - offset >= MESSAGE.size:
            end = offset + MESSAGE.size + MESSAGE.unpack_from(data, offset)[1]
            if end > len(data):
                break
            self.check(data[offset + MESSAGE.size : end])
            self._num_messages += 1
            self.tally.num_answers += 1
            offset = end
        self._partial = data[offset:]


class StreamClient(GrpcClient):
    """A client of `ModelStreamInfer`, whose errors are also messages."""

    def check(self, message: bytes) -> None:
        if message.startswith(ERROR_MESSAGE):
            self.tally.failures.append(message.decode(errors="replace"))


def http_request(authority: str, path: str, body: bytes, **headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Host: {authority}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class HttpClient(Client):
    """A client for answers with a Content-Length."""

    def __init__(self, tally: Tally, request: bytes) -> None:
        super().__init__(tally)
        self._request = request
        self._buffer = b""

    def send(self) -> None:
        assert self.transport is not None
        self.sent_at = time.perf_counter()
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        length = int(head.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])
        if len(body) < length:
            return
        if not head.startswith(b"HTTP/1.1 200"):
            self.tally.failures.append(self._buffer.decode(errors="replace"))
        self._buffer = body[length:]
        self.tally.num_answers += 1
        self.answered()


class EventClient(HttpClient):
    """A client for server-sent events in a chunked body."""

    def __init__(self, tally: Tally, request: bytes) -> None:
        super().__init__(tally, request)
        self._num_events = 0

    def send(self) -> None:
        self._num_events, self._buffer = 0, b""
        super().send()

    def data_received(self, data: bytes) -> None:
        text = self._buffer + data
        if not self._buffer and not text.startswith(b"HTTP/1.1 200"):
            self.tally.failures.append(text.decode(errors="replace"))
        found = text.count(b"data: ")
        self._num_events += found
        self.tally.num_answers += found
        self._buffer = text[-5:]  # the longest incomplete part of a counted text, or of the last chunk
        if text.endswith(b"0\r\n\r\n"):
            if not self._num_events:
                self.tally.failures.append(text.decode(errors="replace"))
            self.answered()


class ChatClient(EventClient):
    """A client for OpenAI's events, which are not one per token: at an answer's end, the difference is added."""

    def __init__(self, tally: Tally, request: bytes, num_tokens: int) -> None:
        super().__init__(tally, request)
        self._num_tokens = num_tokens

    def data_received(self, data: bytes) -> None:
        before, is_last = self._num_events, data.endswith(b"0\r\n\r\n")
        found = self.tally.num_answers
        super().data_received(data)
        if is_last:
            self.tally.num_answers = found + self._num_tokens - before
