"""Decodes the data of an `InferTensorContents`: many numbers at a time, without long calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from llmserve.frontends.grpc.wire_fields import FIXED32, FIXED64, LENGTH_DELIMITED, MAX_VARINT_BYTES, VARINT
from llmserve.wire.pieces import copied

Values: TypeAlias = NDArray[Any] | tuple[()]

DTYPES = {1: np.bool_, 2: np.int32, 3: np.int64, 4: np.uint32, 5: np.uint64, 6: np.float32, 7: np.float64}  # by field
FLOATS = {6: FIXED32, 7: FIXED64}
PIECE_BYTES = 64 * 1024


def decoded_bytes(number: int, num_packed: int) -> int:
    """The most memory for a field's packed numbers after decoding; 0 for floats, which are not copied."""
    return 0 if number in FLOATS else num_packed * np.dtype(DTYPES[number]).itemsize


def decode_field(number: int, kind: int, value: memoryview) -> NDArray[Any] | bytes:
    """Decodes one field: packed numbers, one number, or a text. Raises `DecodeError`."""
    if number not in DTYPES:
        if kind != LENGTH_DELIMITED:
            raise DecodeError("a string is expected")
        return copied(value)
    dtype = np.dtype(DTYPES[number])
    if number in FLOATS:
        if kind not in (LENGTH_DELIMITED, FLOATS[number]) or len(value) % dtype.itemsize:
            raise DecodeError("packed numbers are truncated")
        return np.frombuffer(value, dtype)
    if kind not in (LENGTH_DELIMITED, VARINT):
        raise DecodeError("numbers have the wrong wire type")
    return _varints(value, dtype)


def join_fields(number: int, pieces: Sequence[Any]) -> Any:
    if number not in DTYPES:
        return pieces
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _varints(data: memoryview, dtype: np.dtype[Any]) -> NDArray[Any]:
    whole = np.frombuffer(data, np.uint8)
    pieces: list[NDArray[Any]] = []
    start = 0
    while start < len(whole):
        piece = whole[start : start + PIECE_BYTES]
        ends = np.flatnonzero(piece < 0x80)
        if not len(ends):
            raise DecodeError("a number is truncated")
        pieces.append(_decoded(piece, ends).astype(dtype))
        start += int(ends[-1]) + 1
    return np.concatenate(pieces) if pieces else np.empty(0, dtype)


def _decoded(piece: NDArray[np.uint8], ends: NDArray[np.intp]) -> NDArray[np.uint64]:
    """The numbers that end at `ends`, modulo 2^64."""
    starts = np.concatenate((np.zeros(1, np.intp), ends[:-1] + 1))
    lengths = ends - starts + 1
    longest = int(lengths.max())
    if longest > MAX_VARINT_BYTES:
        raise DecodeError("a number has more than 64 bits")
    numbers = (piece[starts] & 0x7F).astype(np.uint64)
    for place in range(1, longest):
        longer = np.flatnonzero(lengths > place)
        digits = (piece[starts[longer] + place] & 0x7F).astype(np.uint64)
        numbers[longer] |= digits << np.uint64(7 * place)
    return numbers
