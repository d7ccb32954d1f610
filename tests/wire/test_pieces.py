"""What comes in pieces is the same in one."""

from __future__ import annotations

import asyncio
import random
import weakref

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


async def test_what_nobody_took_is_given_back_between_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "CRUMB_BYTES", 7)
    monkeypatch.setattr(pieces, "BLOCK_BYTES", 16)
    monkeypatch.setattr(pieces, "BLOCKS_AT_ONCE", 3)
    made = Pieces()
    made.add(bytes(16 * 10))
    blocks = [weakref.ref(block) for block in made._blocks]
    del made
    left: list[int] = []
    while not left or left[-1]:
        await asyncio.sleep(0)
        left.append(sum(block() is not None for block in blocks))
    assert left[:4] == [7, 4, 1, 0]


def test_what_nobody_took_in_a_thread_goes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "CRUMB_BYTES", 7)
    monkeypatch.setattr(pieces, "BLOCK_BYTES", 16)
    made = Pieces()
    made.add(bytes(16 * 100))
    block = weakref.ref(made._blocks[0])
    del made
    assert block() is None
