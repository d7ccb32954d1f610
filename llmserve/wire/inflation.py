"""Inflating what a client has compressed, a piece at a time: no call takes long, and whoever asks can stop."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from llmserve.wire.pieces import in_pieces

PIECE_BYTES = 256 * 1024  # that go in, and come out, in one call


def inflated(inflater: zlib._Decompress, data: bytes | memoryview) -> Iterator[bytes]:
    """What `data` is. Of what follows the end of the compressed data, only the beginning is read, to `unused_data`.

    All of it would be kept, and copied again for each piece. Raises `zlib.error`.
    """
    for piece in in_pieces(data, PIECE_BYTES):
        rest, is_full = piece, True
        while rest or is_full:
            plain = inflater.decompress(rest, PIECE_BYTES)
            yield plain
            if inflater.unused_data:
                return
            rest, is_full = inflater.unconsumed_tail, len(plain) == PIECE_BYTES
