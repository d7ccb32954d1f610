"""Frames on the socket: a header of fixed size, JSON for rare data, and rows of numbers for each step's data.

Uses only the standard library, because clients may be in another environment. JSON may have `NaN` and `Infinity`, as in
Python. Both ends start with a preamble in a format that never changes: the protocol's name and version.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, TypeAlias

VERSION = 8
MAGIC = b"llmseng"
PREAMBLE = struct.Struct("=7sB")
HEADER = struct.Struct("=B3xIIIQ")  # kind; bytes of JSON; integers; floats; bytes of the blob
INTEGER: Final = "q"
FLOAT: Final = "d"
NUMBER_BYTES = 8
MAX_REQUEST_BYTES = 1 << 26  # of a frame to the engine
MAX_ANSWER_BYTES = 1 << 30  # of a frame from it: logits are large

Bytes: TypeAlias = bytes | bytearray | memoryview


class Kind(IntEnum):
    SUBMIT = 1  # client -> engine: a request; JSON, and the prompt as integers
    CANCEL = 2  # client -> engine: streams without a reader, as integers
    WATCH = 3  # client -> engine: a tenant whose allowance it needs
    HELLO = 4  # engine -> client: its description
    EVENTS = 5  # engine -> client: the events of one step in all streams of the client
    STATE = 6  # engine -> client: statistics, health, allowances; when they change
    GOODBYE = 7  # engine -> client: the reason why it ends
    ADD_ADAPTER = 8  # client -> engine: the number of the call, a directory, and the digest that it had
    ADDED = 9  # engine -> client: the number of the call, and its error, if any
    REMOVE_ADAPTER = 10  # client -> engine: a digest


class ProtocolError(Exception):
    """Data that is not this protocol, or another version of it. Ends the connection, and nothing else."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: Kind
    document: Any = None  # any JSON value; None: nothing
    integers: Sequence[int] = ()
    floats: Sequence[float] = ()
    blob: Bytes = b""

    def encoded(self) -> bytes:
        text = b"" if self.document is None else json.dumps(self.document, separators=(",", ":")).encode()
        header = HEADER.pack(self.kind, len(text), len(self.integers), len(self.floats), len(self.blob))
        return b"".join(
            (header, text, array(INTEGER, self.integers).tobytes(), array(FLOAT, self.floats).tobytes(), self.blob)
        )


class FrameReader:
    """Converts received bytes to frames. `max_bytes`: per frame."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._waiting = bytearray()
        self._has_preamble = False

    def feed(self, data: Bytes) -> Iterator[Frame]:
        """Raises `ProtocolError`; after that, nothing more can be read."""
        self._waiting += data
        if not self._has_preamble:
            if len(self._waiting) < PREAMBLE.size:
                return
            check_preamble(bytes(self._waiting[: PREAMBLE.size]))
            self._has_preamble = True
            del self._waiting[: PREAMBLE.size]
        begin = 0
        while len(self._waiting) - begin >= HEADER.size:
            kind, num_text, num_integers, num_floats, num_blob = HEADER.unpack_from(self._waiting, begin)
            size = num_text + NUMBER_BYTES * (num_integers + num_floats) + num_blob
            if size > self._max_bytes:
                raise ProtocolError(f"a frame has {size} bytes; the limit is {self._max_bytes}")
            end = begin + HEADER.size + size
            if len(self._waiting) < end:
                break
            body = bytes(memoryview(self._waiting)[begin + HEADER.size : end])
            yield _frame(kind, body, num_text, num_integers, num_floats)
            begin = end
        del self._waiting[:begin]


def preamble() -> bytes:
    return PREAMBLE.pack(MAGIC, VERSION)


def check_preamble(data: bytes) -> None:
    magic, version = PREAMBLE.unpack(data)
    if magic != MAGIC:
        raise ProtocolError(
            f"the first bytes are {data!r}, which is not llmserve's engine protocol; check the socket's path"
        )
    if version != VERSION:
        raise ProtocolError(
            f"the other side uses version {version} of the engine protocol, this side version {VERSION}; run the "
            "same release of llmserve on both"
        )


def _frame(kind: int, body: bytes, num_text: int, num_integers: int, num_floats: int) -> Frame:
    view = memoryview(body)
    floats_at = num_text + NUMBER_BYTES * num_integers
    blob_at = floats_at + NUMBER_BYTES * num_floats
    try:
        return Frame(
            Kind(kind),
            json.loads(body[:num_text]) if num_text else None,
            view[num_text:floats_at].cast(INTEGER).tolist(),
            view[floats_at:blob_at].cast(FLOAT).tolist(),
            view[blob_at:],
        )
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"invalid frame: {error}") from error
