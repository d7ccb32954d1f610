"""What comes in pieces is the same in one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.wire import pieces
from llmserve.wire.pieces import Pieces


@given(st.lists(st.integers(0, 40), max_size=30), st.booleans())
def test_pieces_make_the_whole(sizes: list[int], is_small: bool) -> None:
    with pytest.MonkeyPatch.context() as small:
        small.setattr(pieces, "CRUMB_BYTES", 7)
        small.setattr(pieces, "BLOCK_BYTES", 16)
        made, expected = Pieces(), b""
        for size in sizes:
            piece = random.Random(size).randbytes(size)
            expected += piece
            made.add(piece)
        assert len(made) == len(expected)
        assert bytes(made.small() if is_small else made.taken()) == expected


def test_much_of_it() -> None:
    made = Pieces()
    data = random.Random(1).randbytes(3_500_000)
    for start in range(0, len(data), 8192):
        made.add(data[start : start + 8192])
    whole = made.taken()
    assert whole.readonly
    assert whole == data
