"""The size of the KV pool, from what is asked for and what memory there is."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from llmserve.engine.base import EngineInfo
from llmserve.engine.cpu import kv_pool
from llmserve.engine.cpu.kv_pool import num_kv_blocks
from llmserve.engine.cpu.layout import EngineHeader
from llmserve.engine.settings import EngineSettings
from llmserve.errors import ResourceExhausted

HEADER = EngineHeader(
    dtype="float16", quantization="", cache_dtype="float16", packing="", vocab_size=100, max_num_tokens=64,
    max_batch_size=4, max_seq_len=64,
    block_size=8, num_layers=2, num_kv_heads=2, head_dim=16, activation_bytes=5000, program="",
)  # fmt: skip
BLOCK_BYTES = 2 * 2 * 2 * 16 * 8 * 2
INFO = EngineInfo(
    name="tiny", target="cpu", architecture="", dtype="float16", digest="", vocab_size=100, max_seq_len=64,
    max_batch_size=4, max_num_tokens=64,
)  # fmt: skip
FILE_BYTES = 3000
ALL = 4 * 64 // 8  # blocks that the whole batch can use


def blocks(path: Path, monkeypatch: pytest.MonkeyPatch, num_free: float, **settings: float) -> int:
    """`num_kv_blocks` where weights and activations leave memory for `num_free` blocks."""
    available = FILE_BYTES + HEADER.activation_bytes + int(num_free * BLOCK_BYTES)
    monkeypatch.setattr(kv_pool, "available_memory_bytes", lambda: available)
    monkeypatch.setattr(kv_pool, "read_header", lambda path: HEADER)
    engine_file = path / "rank0.engine"
    engine_file.write_bytes(bytes(FILE_BYTES))
    return num_kv_blocks(engine_file, INFO, EngineSettings(**settings))  # type: ignore[arg-type]


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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert blocks(tmp_path, monkeypatch, num_free, **settings) == expected
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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert blocks(tmp_path, monkeypatch, num_free, **settings) == expected
    (message,) = caplog.messages
    assert f"it gets {expected * 8} tokens" in message
    assert "kv_cache_free_gpu_mem_fraction" in message


@pytest.mark.parametrize("num_free", [15, 1, 0, -1])
def test_a_pool_without_room_for_one_longest_sequence_is_refused(
    num_free: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ResourceExhausted, match="room for one sequence of 64 tokens"):
        blocks(tmp_path, monkeypatch, num_free, kv_cache_fraction=0.5)


def test_more_tokens_than_there_is_memory_for_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResourceExhausted, match=r"168 tokens needs .*lower max_tokens_in_paged_kv_cache"):
        blocks(tmp_path, monkeypatch, 20, max_kv_tokens=161)


def test_a_small_pool_is_cut_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResourceExhausted, match="room for one sequence"):
        blocks(tmp_path, monkeypatch, 7, max_kv_tokens=56)


def test_memory_that_belongs_to_an_engine_beside_it_is_not_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = 100 * BLOCK_BYTES
    assert blocks(tmp_path, monkeypatch, 101 + ALL / 0.9, reserved_bytes=beside) == ALL
    with pytest.raises(ResourceExhausted, match=r"room for one sequence .* MiB belong to the engine beside it"):
        blocks(tmp_path, monkeypatch, 107, reserved_bytes=beside)
    with pytest.raises(ResourceExhausted, match="belong to the engine beside it"):
        blocks(tmp_path, monkeypatch, 120, reserved_bytes=beside, max_kv_tokens=200)
