"""A gRPC client frame by frame, which can do everything that real ones do not."""

from __future__ import annotations

import contextlib
import socket

import pytest
from hpack import Decoder, Encoder

from llmserve.wire.http2 import frames
from llmserve.wire.http2.frames import frame
from llmserve.wire.http2.messages import framed
from tests.frontends.server import HOST

SERVICE = "/inference.GRPCInferenceService/"


class RawClient:
    def __init__(self, port: int, *, preface: bytes = frames.PREFACE + frame(frames.SETTINGS, 0, 0)) -> None:
        self.socket = socket.create_connection((HOST, port), timeout=10)
        self.encoder, self.decoder = Encoder(), Decoder()
        self._buffer = b""
        self.send(preface)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def flood(self, data: bytes) -> None:
        """Send what the server need not read to its end."""
        with contextlib.suppress(ConnectionError):
            self.send(data)

    def headers(self, method: str, **more: str) -> bytes:
        fields = {":method": "POST", ":scheme": "http", ":path": SERVICE + method, ":authority": "x", "te": "trailers"}
        fields |= {"content-type": "application/grpc"} | {name.replace("_", "-"): value for name, value in more.items()}
        return self.encoder.encode(list(fields.items()))

    def call(self, stream: int, method: str, message: bytes, **more: str) -> None:
        self.send(frame(frames.HEADERS, frames.END_HEADERS, stream, self.headers(method, **more)))
        self.send(frame(frames.DATA, frames.END_STREAM, stream, framed(message)))

    def head(self, stream: int) -> dict[str, str]:
        """The next headers of this stream."""
        return {str(name): str(value) for name, value in self.decoder.decode(self.until(frames.HEADERS, stream))}

    def receive(self) -> tuple[int, int, int, bytes]:
        """Kind, flags, stream and payload of the next frame; EOFError at the end."""
        high, low, kind, flags, stream = frames.HEAD.unpack(self._exactly(frames.HEAD.size))
        return kind, flags, stream, self._exactly(high << 8 | low)

    def until(self, kind: int, stream: int = 0) -> bytes:
        while True:
            found, _, where, payload = self.receive()
            if (found, where) == (kind, stream):
                return payload
            if found == frames.HEADERS:
                self.decoder.decode(payload)

    def reset(self, stream: int) -> int:
        """The code with which the server ends a stream."""
        (code,) = frames.WORD.unpack(self.until(frames.RST_STREAM, stream))
        return int(code)

    def status(self, stream: int) -> dict[str, str]:
        """The trailers of a call."""
        while True:
            kind, flags, where, payload = self.receive()
            if kind == frames.HEADERS:
                fields = self.decoder.decode(payload)
                if where == stream and flags & frames.END_STREAM:
                    return {str(name): str(value) for name, value in fields}

    def goaway(self) -> int:
        """The code with which the server closes the connection."""
        (code,) = frames.WORD.unpack_from(self.until(frames.GOAWAY), 4)
        with pytest.raises((EOFError, ConnectionError)):
            self.receive()
        return int(code)

    def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError
            self._buffer += data
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken
