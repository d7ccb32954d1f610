"""protobuf's wire format, field by field: https://protobuf.dev/programming-guides/encoding."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import DecodeError

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
FIXED_SIZES = {FIXED64: 8, FIXED32: 4}
MAX_VARINT_BYTES = 10


def fields_of(data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Yields number, kind and value of each field; the value of a varint is its bytes. Raises `DecodeError`."""
    offset = 0
    while offset < len(data):
        tag, offset = _varint(data, offset)
        number, kind = tag >> 3, tag & 7
        start = offset
        if kind == VARINT:
            _, end = _varint(data, offset)
        elif kind == LENGTH_DELIMITED:
            size, start = _varint(data, offset)
            end = start + size
        elif kind in FIXED_SIZES:
            end = start + FIXED_SIZES[kind]
        else:
            raise DecodeError(f"a field has the unsupported wire type {kind}")
        if number == 0 or end > len(data):
            raise DecodeError("a field is truncated")
        yield number, kind, data[start:end]
        offset = end


def encoded_field(number: int, kind: int, value: memoryview) -> bytes:
    head = encoded_varint(number << 3 | kind)
    if kind == LENGTH_DELIMITED:
        head += encoded_varint(len(value))
    return head + bytes(value)


def encoded_varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _varint(data: memoryview, offset: int) -> tuple[int, int]:
    """A number, and the position after it."""
    number = shift = 0
    for at in range(offset, min(offset + MAX_VARINT_BYTES, len(data))):
        byte = data[at]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at + 1
        shift += 7
    raise DecodeError("a number is truncated")
