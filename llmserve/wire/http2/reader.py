"""Converts bytes to frames: checks the preface and sizes, and joins header blocks from their pieces."""

from __future__ import annotations

from collections.abc import Callable

from llmserve.wire.http2 import frames
from llmserve.wire.http2.frames import ConnectionFailed
from llmserve.wire.http2.headers import MAX_BLOCK_BYTES

MAX_FRAME = 1024 * 1024  # the largest accepted
MAX_PIECES = 64  # of one header block; more are only sent to keep a server busy

Take = Callable[[int, int, int, bytes], None]  # kind, flags, stream, payload


class FrameReader:
    """Calls `take` for every frame. HEADERS are complete, without padding and priority; CONTINUATION is merged in."""

    def __init__(self, take: Take) -> None:
        self.has_preface = False
        self._take = take
        self._buffer = bytearray()
        self._has_settings = False  # the client's first frame has come
        self._block: tuple[int, int, bytearray] | None = None  # stream, flags, incomplete headers
        self._num_pieces = 0

    def feed(self, data: bytes | memoryview) -> None:
        self._buffer += data
        if self.has_preface or self._take_preface():
            self._take_frames()

    def _take_preface(self) -> bool:
        start = bytes(self._buffer[: len(frames.PREFACE)])
        if not frames.PREFACE.startswith(start):
            raise ConnectionFailed(frames.PROTOCOL_ERROR, "this is a port for gRPC over HTTP/2")
        if len(start) < len(frames.PREFACE):
            return False
        del self._buffer[: len(frames.PREFACE)]
        self.has_preface = True
        return True

    def _take_frames(self) -> None:
        buffer, offset = self._buffer, 0
        while len(buffer) - offset >= frames.HEAD.size:
            high, low, kind, flags, stream = frames.HEAD.unpack_from(buffer, offset)
            length = high << 8 | low
            if length > MAX_FRAME:
                raise ConnectionFailed(frames.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            stream &= frames.LARGEST_WINDOW
            frames.check_form(kind, flags, stream, length)  # before any of it is stored
            end = offset + frames.HEAD.size + length
            if end > len(buffer):
                break
            payload = bytes(buffer[offset + frames.HEAD.size : end])
            offset = end
            self._take_frame(kind, flags, stream, payload)
        del buffer[:offset]

    def _take_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if not self._has_settings:
            if kind != frames.SETTINGS or flags & frames.ACK:
                raise ConnectionFailed(frames.PROTOCOL_ERROR, "the first frame must be SETTINGS")
            self._has_settings = True
        if (self._block is not None) != (kind == frames.CONTINUATION):
            raise ConnectionFailed(frames.PROTOCOL_ERROR, "an interrupted header block, or an unexpected CONTINUATION")
        if kind == frames.HEADERS:
            block = frames.without_priority(flags, frames.without_padding(flags, payload))
            _check_block(len(block), num_pieces=1)
            if flags & frames.END_HEADERS:
                self._take(kind, flags, stream, block)
            else:
                self._block, self._num_pieces = (stream, flags, bytearray(block)), 1
        elif kind == frames.CONTINUATION:
            self._continue(flags, stream, payload)
        else:
            self._take(kind, flags, stream, payload)

    def _continue(self, flags: int, stream: int, payload: bytes) -> None:
        assert self._block is not None
        begun, first_flags, block = self._block
        if stream != begun:
            raise ConnectionFailed(frames.PROTOCOL_ERROR, f"headers of stream {begun} continue on stream {stream}")
        block += payload
        self._num_pieces += 1
        _check_block(len(block), self._num_pieces)
        if flags & frames.END_HEADERS:
            self._block = None
            self._take(frames.HEADERS, first_flags, begun, bytes(block))


def _check_block(size: int, num_pieces: int) -> None:
    """Check the size of a header block, and its number of pieces."""
    if size > MAX_BLOCK_BYTES or num_pieces > MAX_PIECES:
        raise ConnectionFailed(frames.ENHANCE_YOUR_CALM, f"headers of more than {MAX_BLOCK_BYTES} bytes")
