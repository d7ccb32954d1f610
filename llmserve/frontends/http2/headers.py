"""Header blocks to request heads, and statuses to header blocks.

A client repeats its headers with every call, and the blocks are then the same few bytes: heads are remembered by their
block for as long as the table that it refers to stays the same.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass

from hpack import Decoder, HPACKError
from hpack.table import HeaderTable

from llmserve.frontends.http2.frames import COMPRESSION_ERROR, PROTOCOL_ERROR, ConnectionFailed

MAX_LIST_BYTES = 64 * 1024
MAX_REMEMBERED = 64
SIZE_UPDATE_MASK, SIZE_UPDATE = 0xE0, 0x20
TIMEOUT_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
MAX_TIMEOUT_DIGITS = 8


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _length(number: int) -> bytes:
    """HPACK's integer with seven bits in its first byte: a text that is not compressed."""
    if number < 127:
        return bytes((number,))
    rest, encoded = number - 127, bytearray((127,))
    while rest >= 128:
        encoded.append(rest % 128 | 128)
        rest //= 128
    encoded.append(rest)
    return bytes(encoded)


# HPACK without a table: statuses by their number or name in the static one, everything else as it is
RESPONSE = (
    b"\x88"
    + _literal(b"content-type", b"application/grpc")
    + _literal(b"grpc-accept-encoding", b"identity, deflate, gzip")
)
UNSUPPORTED_MEDIA_TYPE = b"\x08\x03415"


@dataclass(frozen=True, slots=True)
class RequestHead:
    path: str
    is_grpc: bool
    encoding: str
    timeout_s: float | None
    metadata: tuple[tuple[str, str | bytes], ...]  # without what is gRPC's own


class _Table(HeaderTable):
    """Tells when it has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.has_changed = False

    def add(self, name: bytes, value: bytes) -> None:
        self.has_changed = True
        super().add(name, value)


class HeadDecoder:
    def __init__(self) -> None:
        self._table = _Table()
        self._decoder = Decoder(max_header_list_size=MAX_LIST_BYTES)
        self._decoder.header_table = self._table
        self._known: dict[bytes, RequestHead] = {}

    def decode(self, block: bytes) -> RequestHead:
        """Every block has to pass here, in order: each may change how the next ones are read."""
        head = self._known.get(block)
        if head is not None:
            return head
        try:
            pairs = self._decoder.decode(block, raw=True)
        except HPACKError as error:
            raise ConnectionFailed(COMPRESSION_ERROR, f"unreadable headers: {error}") from error
        head = request_head([(bytes(name), bytes(value)) for name, value in pairs])
        if self._table.has_changed or (block and block[0] & SIZE_UPDATE_MASK == SIZE_UPDATE):
            self._table.has_changed = False
            self._known.clear()
        elif len(self._known) < MAX_REMEMBERED:
            self._known[block] = head
        return head


def request_head(pairs: list[tuple[bytes, bytes]]) -> RequestHead:
    fields = dict(pairs)
    timeout = fields.get(b"grpc-timeout")
    return RequestHead(
        path=_text(fields.get(b":path", b"")),
        is_grpc=fields.get(b":method") == b"POST" and fields.get(b"content-type", b"").startswith(b"application/grpc"),
        encoding=_text(fields.get(b"grpc-encoding", b"identity")),
        timeout_s=None if timeout is None else _seconds(timeout),
        metadata=tuple((_text(name), _metadata_value(name, value)) for name, value in pairs if _is_metadata(name)),
    )


def _text(value: bytes) -> str:
    return value.decode("utf-8", errors="replace")


def _is_metadata(name: bytes) -> bool:
    return not name.startswith((b":", b"grpc-")) and name not in (b"te", b"content-type")


def _metadata_value(name: bytes, value: bytes) -> str | bytes:
    """Values of names in -bin are bytes, in base64 with or without its padding."""
    if not name.endswith(b"-bin"):
        return _text(value)
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4))
    except ValueError:
        return b""


def _seconds(value: bytes) -> float:
    digits, unit = value[:-1], value[-1:]
    if not (digits.isdigit() and len(digits) <= MAX_TIMEOUT_DIGITS and unit in TIMEOUT_UNITS):
        raise ConnectionFailed(PROTOCOL_ERROR, f"grpc-timeout is no time: {value!r}")
    return int(digits) * TIMEOUT_UNITS[unit]


def trailers(status: int, details: str = "") -> bytes:
    """A block with the status of a call; `details` are percent-encoded."""
    block = _literal(b"grpc-status", str(status).encode())
    return block + _literal(b"grpc-message", _percent_encoded(details)) if details else block


def _percent_encoded(text: str) -> bytes:
    encoded = text.encode("utf-8", errors="replace")
    return b"".join(bytes((byte,)) if 0x20 <= byte < 0x7F and byte != 0x25 else b"%%%02X" % byte for byte in encoded)
