"""The size of the KV pool, from what is asked for and what memory there is."""

from __future__ import annotations

import logging
import re
from fractions import Fraction

import pytest

from llmserve.engine.base import EngineInfo
from llmserve.engine.kv_pool import PoolShape, blocks_beside, num_kv_blocks
from llmserve.engine.settings import EngineSettings
from llmserve.errors import ResourceExhausted
from llmserve.scheduler.settings import NO_WINDOWS, WindowedLayers

BLOCK_BYTES = 2 * 2 * 2 * 16 * 8 * 2
INFO = EngineInfo(
    name="tiny", target="cpu", architecture="", dtype="float16", digest="", vocab_size=100, max_seq_len=64,
    max_batch_size=4, max_num_tokens=64,
)  # fmt: skip
BLOCK_SIZE = 8
ALL = 4 * 64 // 8  # blocks that the whole batch can use


def blocks(num_free: float, **settings: float) -> int:
    """`num_kv_blocks` where there is memory for `num_free` blocks."""
    memory = {"block_bytes": BLOCK_BYTES, "free_bytes": int(num_free * BLOCK_BYTES)}
    return num_kv_blocks(INFO, EngineSettings(**settings), block_size=BLOCK_SIZE, **memory)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_free", "settings", "expected"),
    [
        (1000, {}, ALL),
        (1000, {"max_kv_tokens": 4000}, 500),
        (1000, {"max_kv_tokens": 9}, 2),
        (2.5, {"max_kv_tokens": 9}, 2),  # fewer than a longest sequence needs, as asked for
        (ALL, {"kv_cache_fraction": 1.0}, ALL),  # to the byte: the weights and activations are taken off once
    ],
)
def test_what_was_asked_for_where_memory_allows_it(
    num_free: float,
    settings: dict[str, float],
    expected: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert blocks(num_free, **settings) == expected
    assert not caplog.records


@pytest.mark.parametrize(
    ("num_free", "settings", "expected"),
    [
        (20, {}, 18),
        (20, {"kv_cache_fraction": 0.5}, 10),
        (ALL - 0.01, {"kv_cache_fraction": 1.0}, ALL - 1),
        (20, {"max_kv_tokens": 160}, 18),  # all of it, but the fraction allows less
        (16, {"kv_cache_fraction": 0.5}, 8),  # one longest sequence
    ],
)
def test_a_pool_that_memory_cuts_is_reported(
    num_free: float,
    settings: dict[str, float],
    expected: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert blocks(num_free, **settings) == expected
    (record,) = caplog.records
    was_asked = "max_kv_tokens" in settings
    assert record.levelno == (logging.WARNING if was_asked else logging.INFO)
    assert ("it gets " if was_asked else "the KV cache has ") + f"{expected * 8} tokens" in record.getMessage()
    assert ("gpu" in record.getMessage()) == was_asked
    assert "--kv-cache-fraction" in record.getMessage()


@pytest.mark.parametrize("num_free", [15, 1, 0, -1])
def test_a_pool_without_room_for_one_longest_sequence_is_refused(num_free: float) -> None:
    with pytest.raises(ResourceExhausted, match="room for one sequence of 64 tokens"):
        blocks(num_free, kv_cache_fraction=0.5)


def test_what_is_needed_and_what_there_is_are_told_apart() -> None:
    with pytest.raises(ResourceExhausted) as caught:
        blocks(20, kv_cache_fraction=1e-7)
    needed, allowed, advice = re.split(", and |; ", str(caught.value), maxsplit=2)
    assert needed.startswith("a KV cache with room for one sequence of 64 tokens needs ")
    assert allowed.startswith("it may have 0.0 MiB: ")
    assert advice.endswith(
        "(--kv-cache-fraction) is 1e-07; raise the fraction, free some memory, or build with a smaller max_seq_len"
    )


def test_more_tokens_than_there_is_memory_for_are_refused() -> None:
    with pytest.raises(ResourceExhausted, match=r"168 tokens needs .*lower max_tokens_in_paged_kv_cache"):
        blocks(20, max_kv_tokens=161)


def test_a_small_pool_is_cut_no_further() -> None:
    with pytest.raises(ResourceExhausted, match="room for one sequence"):
        blocks(7, max_kv_tokens=56)


def test_memory_that_belongs_to_an_engine_beside_it_is_named() -> None:
    with pytest.raises(ResourceExhausted, match=r"room for one sequence .* MiB are reserved for the other engine"):
        blocks(7, reserved_bytes=100 * BLOCK_BYTES)
    with pytest.raises(ResourceExhausted, match="are reserved for the other engine"):
        blocks(20, reserved_bytes=100 * BLOCK_BYTES, max_kv_tokens=200)


def test_a_pool_beside_another_has_room_for_the_same_sequences() -> None:
    whole, windowed = PoolShape(32, NO_WINDOWS), PoolShape(32, WindowedLayers(1024, 5))
    of_window = -(-(1023 + 64) // 32) + 1
    assert windowed.num_blocks_for(8192) == 256 + 5 * of_window
    assert blocks_beside(whole, whole, 8192) == blocks_beside(windowed, windowed, 8192) == 1
    assert blocks_beside(whole, PoolShape(16, NO_WINDOWS), 8192) == 2
    assert blocks_beside(windowed, whole, 8192) == Fraction(256, 256 + 5 * of_window), "for the longest ones"
    assert blocks_beside(whole, windowed, 8192) == 6, "for short ones"
