"""gRPC messages in DATA: five bytes (compressed or not, length) and then the message, cut anywhere."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Collection, Iterator

from grpc import StatusCode

PREFIX = struct.Struct(">BI")
MAX_MESSAGE_BYTES = 2**31 - 1
WINDOW_BITS = {"gzip": 31, "deflate": 15}
INLINE_BYTES = 256 * 1024  # what is inflated or deflated on the event loop; more of a message in a worker thread


class BadMessage(Exception):
    """Ends its call with `code`."""

    def __init__(self, code: StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def framed(message: bytes) -> bytes:
    return PREFIX.pack(0, len(message)) + message


class Compressor:
    """Makes messages smaller in `encoding`; `level` is zlib's, 1 (fast) to 9."""

    __slots__ = ("_level", "_window_bits", "encoding")

    def __init__(self, encoding: str, level: int) -> None:
        self.encoding = encoding
        self._window_bits = WINDOW_BITS[encoding]
        self._level = level

    @classmethod
    def accepted(cls, encodings: Collection[str], level: int) -> Compressor | None:
        """In one of a client's encodings; None when it takes none of ours."""
        return next((cls(encoding, level) for encoding in WINDOW_BITS if encoding in encodings), None)

    async def framed(self, message: bytes) -> bytes:
        """As it is when it would not become smaller."""
        if len(message) > INLINE_BYTES:
            small = await asyncio.to_thread(self._deflate, message)
        else:
            small = self._deflate(message)
        return PREFIX.pack(1, len(small)) + small if len(small) < len(message) else framed(message)

    def _deflate(self, message: bytes) -> bytes:
        deflater = zlib.compressobj(self._level, wbits=self._window_bits)
        return deflater.compress(message) + deflater.flush()


class Compressed:
    """A message as it came."""

    __slots__ = ("_data", "_encoding", "_inflater")

    def __init__(self, data: bytes, encoding: str) -> None:
        if encoding == "identity":
            raise BadMessage(StatusCode.INTERNAL, "a message is compressed, and grpc-encoding does not say how")
        if encoding not in WINDOW_BITS:
            raise BadMessage(StatusCode.UNIMPLEMENTED, f"cannot decompress '{encoding}': use gzip or deflate")
        self._data = data
        self._encoding = encoding
        self._inflater = zlib.decompressobj(WINDOW_BITS[encoding])

    async def plain(self) -> bytes:
        """Raises `BadMessage`."""
        plain = self._inflate(self._data, INLINE_BYTES)
        if len(plain) == INLINE_BYTES and not self._inflater.eof:
            plain = await asyncio.to_thread(self._inflate_rest, plain)
        if not self._inflater.eof:
            problem = "it is too large" if self._inflater.unconsumed_tail else "it is cut off"
            raise BadMessage(StatusCode.INTERNAL, f"a message is not valid {self._encoding}: {problem}")
        return plain

    def _inflate_rest(self, begun: bytes) -> bytes:
        return begun + self._inflate(self._inflater.unconsumed_tail, MAX_MESSAGE_BYTES - len(begun))

    def _inflate(self, data: bytes, limit: int) -> bytes:
        try:
            return self._inflater.decompress(data, limit)
        except zlib.error as error:
            raise BadMessage(StatusCode.INTERNAL, f"a message is not valid {self._encoding}: {error}") from error


class Assembler:
    """Collects what a client sends in one call."""

    __slots__ = ("_encoding", "_partial")

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._partial = bytearray()

    @property
    def is_in_message(self) -> bool:
        """A message has begun to arrive and has not ended."""
        return bool(self._partial)

    def feed(self, data: bytes) -> Iterator[bytes | Compressed]:
        """The messages that are complete with `data`."""
        if not self._partial and len(data) >= PREFIX.size:
            flag, length = PREFIX.unpack_from(data)
            if length == len(data) - PREFIX.size and not flag:  # a message is mostly a frame of its own
                yield data[PREFIX.size :]
                return
        partial = self._partial
        partial += data
        offset = 0
        while len(partial) - offset >= PREFIX.size:
            flag, length = PREFIX.unpack_from(partial, offset)
            if flag > 1:
                raise BadMessage(StatusCode.INTERNAL, f"a message begins with {flag} instead of 0 or 1")
            if length > MAX_MESSAGE_BYTES:
                raise BadMessage(StatusCode.RESOURCE_EXHAUSTED, f"a message of {length} bytes is too large")
            end = offset + PREFIX.size + length
            if end > len(partial):
                break
            message = bytes(partial[offset + PREFIX.size : end])
            offset = end
            yield Compressed(message, self._encoding) if flag else message
        del partial[:offset]
