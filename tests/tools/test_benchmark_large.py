"""The large network of `make bench`, here a small one: built, measured and deleted, or skipped with a word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tools.benchmark import large
from tools.benchmark.checkpoint import make_checkpoint
from tools.benchmark.contestants import OURS, OURS_MODULE
from tools.benchmark.job import Job
from tools.benchmark.shapes import SHAPES, BaichuanShape

LIMITS = {"read_bytes": 1e10, "products": 1e11, "products_int8": 1e12}


def job(folder: Path, shape: str, precision: str = "int8") -> Job:
    return Job(OURS_MODULE, precision, shape, folder, threads=1, cells=(large.DECODE,))


def test_the_large_shape_is_baichuan2s() -> None:
    shape = SHAPES[large.SHAPE]
    assert 7.4e9 < shape.num_parameters < 7.6e9
    assert shape.num_parameters == sum(int(np.prod(dimensions)) for _, dimensions in shape.tensors())
    assert dict(shape.tensors())["model.layers.31.self_attn.W_pack.weight"] == (12288, 4096)


def test_it_is_built_measured_and_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "SHAPE", "tiny")
    said: list[str] = []
    found = large.measure_large(OURS, job(tmp_path, ""), lambda: LIMITS, said.append)
    assert [one.name for one in found] == ["llmserve float16 tiny", "llmserve int8 tiny"]
    for one in found:
        assert one.reason == ""
        assert {"compile", "time tactics", "self-test", "seal"} <= one.record["phases_s"].keys()
        assert 0 < sum(one.record["phases_s"].values()) <= one.record["build_s"]
        assert min(one.record[name] for name in ("build_peak_bytes", "file_bytes", "open_s", "fraction")) > 0
    assert list(tmp_path.iterdir()) == []
    page = large.large_section(found)
    assert page.count("| llmserve ") == 2
    assert "time tactics" in page


def test_a_checkpoint_that_was_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "SHAPE", "tiny")
    make_checkpoint(job(tmp_path, "tiny").checkpoint, SHAPES["tiny"])
    monkeypatch.setattr(large, "_run", lambda job: ({}, "it fell over"))
    found = large.measure_large(OURS, job(tmp_path, ""), lambda: LIMITS, lambda text: None)
    assert [one.reason for one in found] == ["it fell over"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-tiny"]
    assert "* llmserve int8 tiny: it fell over" in large.large_section(found)


def test_what_is_short_is_said(tmp_path: Path) -> None:
    whole = job(tmp_path, "7b")
    assert large.what_is_short(whole, free_bytes=26 * 10**9, memory_bytes=12 * 10**9) == ""
    assert large.what_is_short(whole, free_bytes=20 * 10**9, memory_bytes=12 * 10**9) == (
        "it needs 26 GB of disk and has 20"
    )
    assert "memory" in large.what_is_short(
        replace(whole, precision="float16"), free_bytes=10**12, memory_bytes=12 * 10**9
    )


def test_a_baichuan_shape_makes_a_checkpoint_that_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = BaichuanShape("small", 64, 176, layers=2, heads=4, kv_heads=4, vocab=320)
    monkeypatch.setitem(SHAPES, "small", shape)
    small = job(tmp_path, "small")
    make_checkpoint(small.checkpoint, shape)
    tensors = load_file(small.checkpoint / "model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == dict(shape.tensors())
    assert large.build_and_measure(small)["tokens_per_s"] > 0
