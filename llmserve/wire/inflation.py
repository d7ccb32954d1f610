"""Inflates compressed data a piece at a time, so that no call takes long and the caller can stop."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from llmserve.wire.pieces import in_pieces

PIECE_BYTES = 256 * 1024  # the most input, and the most output, of one call


def inflated(inflater: zlib._Decompress, data: bytes | memoryview) -> Iterator[bytes]:
    """Inflate `data`. Of the bytes after the end of the compressed data, only the first are read, into `unused_data`.

    Otherwise zlib would keep all of them, and copy them again for each piece. Raises `zlib.error`.
    """
    for piece in in_pieces(data, PIECE_BYTES):
        rest, is_full = piece, True
        while rest or is_full:
            plain = inflater.decompress(rest, PIECE_BYTES)
            yield plain
            if inflater.unused_data:
                return
            rest, is_full = inflater.unconsumed_tail, len(plain) == PIECE_BYTES
