"""Converts header blocks to request heads, and statuses to header blocks.

An error in one request's headers ends only that call: a proxy sends calls of many clients over one connection. Only a
block that cannot be decoded ends the connection, because later blocks cannot be decoded either.

A client repeats its headers with every call, and the blocks are then the same few bytes. So heads are cached by block,
as long as the table that the block refers to stays the same.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import quote

from grpc import StatusCode
from hpack import Decoder, HPACKError
from hpack.exceptions import OversizedHeaderListError
from hpack.table import HeaderTable

from llmserve.wire.http2.frames import COMPRESSION_ERROR, ENHANCE_YOUR_CALM, ConnectionFailed
from llmserve.wire.http2.messages import WINDOW_BITS, BadMessage

MAX_LIST_BYTES = 64 * 1024  # of headers, as the protocol counts them; more ends the call
MAX_BLOCK_BYTES = 72 * 1024  # of headers, compressed; more ends the connection. Decoding them takes 25 ms at most
MAX_DECODED_BYTES = 256 * 1024  # of headers; more ends the connection
LARGE_BLOCK_BYTES = 16 * 1024  # larger blocks count against the flood limit
ENTRY_BYTES = 32  # added per header to the size of its name and value (RFC 9113, section 6.5.2)
MAX_DETAILS_BYTES = 4096  # details travel as a header, and clients refuse headers over 8 KiB
PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
MAX_REMEMBERED = 64
MAX_REMEMBERED_BYTES = 8 * 1024  # of one request's headers
SIZE_UPDATE_MASK, SIZE_UPDATE = 0xE0, 0x20
MANY_SIZE_UPDATES = re.compile(rb"(?:[\x20-\x3e]|\x3f[\x80-\xff]*[\x00-\x7f]){9}")  # two are useful (RFC 7541, 4.2)

REQUIRED = frozenset((b":method", b":scheme", b":path"))
PSEUDO = REQUIRED | {b":authority"}
OF_CONNECTIONS = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))
NAME = re.compile(rb":?[!#$%&'*+.^_`|~0-9a-z-]+", re.ASCII)
BAD_VALUE = re.compile(rb"[\0\r\n]")  # RFC 9113 also forbids white space at the ends, but grpc clients send it
GRPC_TYPE = re.compile(rb"application/grpc(?:[+;].*)?", re.IGNORECASE)
TIMEOUT_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
MAX_TIMEOUT_DIGITS = 8

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _length(number: int) -> bytes:
    """The length of an uncompressed text, as HPACK's integer with seven bits in its first byte."""
    if number < 127:
        return bytes((number,))
    rest, encoded = number - 127, bytearray((127,))
    while rest >= 128:
        encoded.append(rest % 128 | 128)
        rest //= 128
    encoded.append(rest)
    return bytes(encoded)


# HPACK without a dynamic table: statuses refer to the static table, all other headers are literal. A client that sets
# a smaller table size expects the next block to confirm it, so every block does.
NO_TABLE = b"\x20"
RESPONSE = (
    NO_TABLE
    + b"\x88"
    + _literal(b"content-type", b"application/grpc")
    + _literal(b"grpc-accept-encoding", b"identity, deflate, gzip")
)
COMPRESSED_RESPONSE = {encoding: RESPONSE + _literal(b"grpc-encoding", encoding.encode()) for encoding in WINDOW_BITS}
UNSUPPORTED_MEDIA_TYPE = NO_TABLE + b"\x08\x03415"


@dataclass(frozen=True, slots=True)
class RequestHead:
    path: str
    is_grpc: bool
    encoding: str
    accepted: tuple[str, ...]  # encodings that the client understands
    timeout_s: float | None
    metadata: Metadata  # without gRPC's own headers
    fault: str = ""  # why this is not a valid HTTP request: the stream is reset
    refusal: BadMessage | None = None  # the status that ends the call


class _Table(HeaderTable):
    """A header table that records whether it has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.has_changed = False

    def add(self, name: bytes, value: bytes) -> None:
        self.has_changed = True
        super().add(name, value)


class HeadDecoder:
    def __init__(self) -> None:
        self._table = _Table()
        self._decoder = Decoder(max_header_list_size=MAX_DECODED_BYTES)
        self._decoder.header_table = self._table
        self._known: dict[bytes, RequestHead] = {}

    def decode(self, block: bytes) -> RequestHead:
        """Decode a block. Pass every block, in order: each one may change how later ones are decoded."""
        head = self._known.get(block)
        if head is not None:
            return head
        updates_size = bool(block) and block[0] & SIZE_UPDATE_MASK == SIZE_UPDATE
        if updates_size and MANY_SIZE_UPDATES.match(block):
            raise ConnectionFailed(ENHANCE_YOUR_CALM, "header blocks that only resize the table")
        pairs = self._decoded(block)
        head = request_head(pairs)
        if self._table.has_changed or updates_size:
            self._table.has_changed = False
            self._known.clear()
        elif _list_bytes(pairs) <= MAX_REMEMBERED_BYTES:
            if len(self._known) == MAX_REMEMBERED:  # blocks with timeouts, for example, rarely repeat
                self._known.clear()
            self._known[block] = head
        return head

    def _decoded(self, block: bytes) -> list[tuple[bytes, bytes]]:
        try:
            return [(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)]
        except OversizedHeaderListError as error:
            raise ConnectionFailed(ENHANCE_YOUR_CALM, f"headers of more than {MAX_DECODED_BYTES} bytes") from error
        except HPACKError as error:
            raise ConnectionFailed(COMPRESSION_ERROR, f"unreadable headers: {error}") from error


def request_head(pairs: list[tuple[bytes, bytes]]) -> RequestHead:
    fields = dict(pairs)
    timeout_s, refusal = None, None
    try:
        if b"grpc-timeout" in fields:
            timeout_s = _seconds(fields[b"grpc-timeout"])
        _check_size(pairs)
    except BadMessage as problem:
        refusal = problem
    return RequestHead(
        path=_text(fields.get(b":path", b"")),
        is_grpc=fields.get(b":method") == b"POST" and GRPC_TYPE.fullmatch(fields.get(b"content-type", b"")) is not None,
        encoding=_text(fields.get(b"grpc-encoding", b"identity")),
        accepted=tuple(each.strip() for each in _text(fields.get(b"grpc-accept-encoding", b"")).split(",")),
        timeout_s=timeout_s,
        metadata=tuple(
            (_text(name), each) for name, value in pairs if _is_metadata(name) for each in _values(name, value)
        ),
        fault=_fault(pairs),
        refusal=refusal,
    )


def _fault(pairs: list[tuple[bytes, bytes]]) -> str:
    """Why a request is malformed (RFC 9113, sections 8.2 and 8.3); "" if it is not."""
    pseudo = [name for name, _ in pairs if name.startswith(b":")]
    if len(set(pseudo)) < len(pseudo) or not REQUIRED <= set(pseudo) <= PSEUDO or not dict(pairs)[b":path"]:
        return f"invalid pseudo-headers of a request: {_text(b' '.join(pseudo))}"
    if any(not name.startswith(b":") for name, _ in pairs[: len(pseudo)]):
        return "pseudo-headers after regular headers"
    for name, value in pairs:
        if not NAME.fullmatch(name) or BAD_VALUE.search(value):
            return f"invalid characters in a header name: {name!r}"
        if name in OF_CONNECTIONS or (name == b"te" and value != b"trailers"):
            return f"a header that HTTP/2 does not allow: {_text(name)}"
    return ""


def _check_size(pairs: list[tuple[bytes, bytes]]) -> None:
    size = _list_bytes(pairs)
    if size > MAX_LIST_BYTES:
        text = f"headers of {size} bytes are too large: the maximum is {MAX_LIST_BYTES}"
        raise BadMessage(StatusCode.RESOURCE_EXHAUSTED, text)


def _list_bytes(pairs: list[tuple[bytes, bytes]]) -> int:
    return sum(len(name) + len(value) + ENTRY_BYTES for name, value in pairs)


def _text(value: bytes) -> str:
    return value.decode("utf-8", errors="replace")


def _is_metadata(name: bytes) -> bool:
    return not name.startswith((b":", b"grpc-")) and name not in (b"te", b"content-type")


def _values(name: bytes, value: bytes) -> list[str | bytes]:
    """The values of a header. One whose name ends in -bin may have several, in base64 with or without padding."""
    if not name.endswith(b"-bin"):
        return [_text(value)]
    return [_decoded_base64(each.strip()) for each in value.split(b",")]


def _decoded_base64(value: bytes) -> bytes:
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4))
    except ValueError:
        return b""


def _seconds(value: bytes) -> float:
    digits, unit = value[:-1], value[-1:]
    if not (digits.isdigit() and len(digits) <= MAX_TIMEOUT_DIGITS and unit in TIMEOUT_UNITS):
        raise BadMessage(StatusCode.INTERNAL, f"grpc-timeout is not valid: '{_text(value)}'")
    return int(digits) * TIMEOUT_UNITS[unit]


def trailers(status: int, details: str = "") -> bytes:
    """A block with the status of a call; `details` are percent-encoded and truncated to fit."""
    block = NO_TABLE + _literal(b"grpc-status", str(status).encode())
    return block + _literal(b"grpc-message", _percent_encoded(details)) if details else block


def with_metadata(block: bytes, metadata: Sequence[tuple[str, str]]) -> bytes:
    """The head of a response with metadata added; names and values must be printable ASCII."""
    return block + b"".join([_literal(name.encode("ascii"), value.encode("ascii")) for name, value in metadata])


def _percent_encoded(text: str) -> bytes:
    while len(encoded := quote(text, safe=PLAIN, errors="replace")) > MAX_DETAILS_BYTES:
        text = text[: len(text) * MAX_DETAILS_BYTES // len(encoded)]
    return encoded.encode()
