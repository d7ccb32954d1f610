"""gRPC messages in DATA: five bytes (compressed or not, length) and then the message, cut anywhere."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from grpc import StatusCode

PREFIX = struct.Struct(">BI")
MAX_MESSAGE_BYTES = 2**31 - 1
WINDOW_BITS = {"gzip": 31, "deflate": 15}


class BadMessage(Exception):
    """Ends its call with `code`."""

    def __init__(self, code: StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def framed(message: bytes) -> bytes:
    return PREFIX.pack(0, len(message)) + message


class Assembler:
    """Collects what a client sends in one call."""

    __slots__ = ("_encoding", "_partial")

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._partial = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
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
            yield self._decompressed(message) if flag else message
        del partial[:offset]

    def _decompressed(self, message: bytes) -> bytes:
        if self._encoding == "identity":
            raise BadMessage(StatusCode.INTERNAL, "a message is compressed, and grpc-encoding does not say how")
        if self._encoding not in WINDOW_BITS:
            raise BadMessage(StatusCode.UNIMPLEMENTED, f"cannot decompress '{self._encoding}': use gzip or deflate")
        decompressor = zlib.decompressobj(WINDOW_BITS[self._encoding])
        try:
            plain = decompressor.decompress(message, MAX_MESSAGE_BYTES)
        except zlib.error as error:
            raise BadMessage(StatusCode.INTERNAL, f"a message is not valid {self._encoding}: {error}") from error
        if not decompressor.eof:
            raise BadMessage(StatusCode.INTERNAL, f"a message is not valid {self._encoding}: it is cut off")
        return plain
