"""gRPC messages in DATA frames: five bytes (compressed or not, length), then the message, split anywhere."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from grpc import StatusCode

from llmserve.wire.event_loop import INLINE_BYTES, beside_loop
from llmserve.wire.inflation import PIECE_BYTES, inflated
from llmserve.wire.pieces import Pieces, in_pieces
from llmserve.wire.request_memory import RequestMemory, Share

PREFIX = struct.Struct(">BI")
MAX_MESSAGE_BYTES = 2**31 - 1
WINDOW_BITS = {"gzip": 31, "deflate": 15}

Message: TypeAlias = bytes | memoryview
Arrived: TypeAlias = bytes | Pieces  # a message with more than `event_loop.INLINE_BYTES` is in pieces


class BadMessage(Exception):
    """Ends its call with `code`."""

    def __init__(self, code: StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class LargeMessage:
    """A message that is sent in parts, because copying it would take long."""

    parts: Sequence[Message]

    def __len__(self) -> int:
        return sum(map(len, self.parts))


def framed(message: bytes) -> bytes:
    return PREFIX.pack(0, len(message)) + message


def framed_parts(message: bytes | LargeMessage, *, is_compressed: bool = False) -> list[Message]:
    prefix = PREFIX.pack(is_compressed, len(message))
    return [prefix + message] if isinstance(message, bytes) else [prefix, *message.parts]


class Compressor:
    """Compresses messages with `encoding`; `level` is zlib's, 1 (fast) to 9."""

    __slots__ = ("_level", "_window_bits", "encoding")

    def __init__(self, encoding: str, level: int) -> None:
        self.encoding = encoding
        self._window_bits = WINDOW_BITS[encoding]
        self._level = level

    @classmethod
    def accepted(cls, encodings: Collection[str], level: int) -> Compressor | None:
        """A compressor for one of a client's encodings; None if none of them is supported."""
        return next((cls(encoding, level) for encoding in WINDOW_BITS if encoding in encodings), None)

    async def framed(self, message: bytes | LargeMessage, memory: RequestMemory, share: Share) -> list[Message]:
        """The framed message in parts; not compressed if that would not make it smaller."""
        parts = message.parts if isinstance(message, LargeMessage) else [message]
        small = await beside_loop(lambda: self._deflate(parts), size=len(message), memory=memory, share=share)
        return framed_parts(small, is_compressed=True) if len(small) < len(message) else framed_parts(message)

    def _deflate(self, parts: Sequence[Message]) -> bytes | LargeMessage:
        deflater = zlib.compressobj(self._level, wbits=self._window_bits)
        pieces = (piece for part in parts for piece in in_pieces(part))
        small = LargeMessage([*map(deflater.compress, pieces), deflater.flush()])
        return b"".join(small.parts) if len(small) <= INLINE_BYTES else small


class Compressed:
    """A compressed message, as received."""

    __slots__ = ("_data", "_encoding", "_inflater")

    def __init__(self, data: Arrived, encoding: str) -> None:
        if encoding == "identity":
            raise BadMessage(StatusCode.INTERNAL, "a message is compressed, but grpc-encoding is missing")
        if encoding not in WINDOW_BITS:
            raise BadMessage(StatusCode.UNIMPLEMENTED, f"cannot decompress '{encoding}': use gzip or deflate")
        self._data = data
        self._encoding = encoding
        self._inflater = zlib.decompressobj(WINDOW_BITS[encoding])

    def __len__(self) -> int:
        return len(self._data)

    async def plain(self, memory: RequestMemory, share: Share) -> Message:
        """The decompressed message. Raises `BadMessage`, and the errors of `Share.grow`."""
        plain = Pieces()
        if isinstance(self._data, bytes):
            pieces = inflated(self._inflater, self._data)
            self._take(islice(pieces, 1), plain, share)
            if len(plain) == PIECE_BYTES and not self._inflater.eof:
                await memory.work(lambda: self._take(pieces, plain, share), share)
        else:
            compressed = self._data
            await memory.work(lambda: self._take(inflated(self._inflater, compressed.taken()), plain, share), share)
        if not self._inflater.eof:
            raise BadMessage(StatusCode.INTERNAL, f"a message is not valid {self._encoding}: it is truncated")
        if len(plain) <= PIECE_BYTES:
            return plain.small()
        return await memory.work(plain.taken, share)

    def _take(self, pieces: Iterable[bytes], plain: Pieces, share: Share) -> None:
        try:
            for piece in pieces:
                if len(plain) + len(piece) > MAX_MESSAGE_BYTES:
                    raise BadMessage(StatusCode.RESOURCE_EXHAUSTED, "a message is too large after decompression")
                share.grow(len(piece))
                plain.add(piece)
        except zlib.error as error:
            raise BadMessage(StatusCode.INTERNAL, f"a message is not valid {self._encoding}: {error}") from error


class Assembler:
    """Assembles the messages that a client sends in one call; each may have `most_bytes`."""

    __slots__ = ("_encoding", "_flag", "_most_bytes", "_num_missing", "_pieces", "_prefix")

    def __init__(self, encoding: str, most_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._encoding = encoding
        self._most_bytes = most_bytes
        self._prefix = b""  # of the next message, as far as received
        self._pieces: Pieces | None = None  # of an incomplete message
        self._num_missing = 0  # bytes that it lacks
        self._flag = 0  # the first byte of its prefix

    @property
    def is_in_message(self) -> bool:
        """Whether a message has begun to arrive and is not complete."""
        return bool(self._prefix) or self._pieces is not None

    def feed(self, data: bytes) -> Iterator[Arrived | Compressed]:
        """The messages that are complete with `data`."""
        if not self._prefix and self._pieces is None and len(data) >= PREFIX.size:
            flag, length = PREFIX.unpack_from(data)
            if length == len(data) - PREFIX.size <= self._most_bytes and not flag:  # the usual case: a frame of its own
                yield data[PREFIX.size :]
                return
        at = 0
        while at < len(data) or (self._pieces is not None and not self._num_missing):
            if self._pieces is None:
                piece = data[at : at + PREFIX.size - len(self._prefix)]
                at += len(piece)
                self._begin(piece)
            else:
                piece = data[at : at + self._num_missing]
                at += len(piece)
                self._num_missing -= len(piece)
                self._pieces.add(piece)
            if self._pieces is not None and not self._num_missing:
                yield self._completed(self._pieces)

    def _begin(self, piece: bytes) -> None:
        self._prefix += piece
        if len(self._prefix) < PREFIX.size:
            return
        self._flag, length = PREFIX.unpack(self._prefix)
        if self._flag > 1:
            raise BadMessage(StatusCode.INTERNAL, f"a message begins with {self._flag} instead of 0 or 1")
        if length > self._most_bytes:
            text = f"a message of {length} bytes is too large: the maximum is {self._most_bytes}"
            raise BadMessage(StatusCode.RESOURCE_EXHAUSTED, text)
        self._prefix, self._pieces, self._num_missing = b"", Pieces(), length

    def _completed(self, pieces: Pieces) -> Arrived | Compressed:
        self._pieces = None
        message = pieces.small() if pieces.num_bytes <= INLINE_BYTES else pieces
        return Compressed(message, self._encoding) if self._flag else message
