"""Weights that a checkpoint has as integers are the same numbers in an int8 engine, to the bit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.quantization import Int4, Int8, Quantized, WeightPart, keeps_integers, quantize_rows, round_weight
from llmserve.builder.resolve import resolve
from llmserve.checkpoint.expanded import write_expanded
from llmserve.checkpoint.integers import Integers
from llmserve.checkpoint.reader import Checkpoint
from llmserve.cli import inspect as inspect_command
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.selftest import SelfTestResult
from llmserve.errors import CheckpointError
from tests import quantized_files
from tests.builder.test_cpu_engine import verified
from tests.gguf_files import make_gguf
from tests.quantized_files import Method, awq, gptq, make_quantized, packed_levels, whole_levels

OPTIONS = BuildOptions(quantization="int8", max_seq_len=64)
WIDTHS: dict[str, Any] = {"intermediate_size": 192}


class Stored:
    """Rows whose integers are `values`."""

    def __init__(self, values: Any, steps: Any) -> None:
        self._integers = Integers(np.array(values), np.array(steps, np.float32))
        self.shape = self._integers.values.shape

    def integers(self, rows: slice, /) -> Integers:
        return Integers(self._integers.values[rows], self._integers.steps[rows])

    def __getitem__(self, rows: slice, /) -> np.ndarray[Any, Any]:
        found = self.integers(rows)
        return (found.values * np.repeat(found.steps, 32, axis=1)[:, : self.shape[1]]).astype(np.float32)


def drawn(steps: np.ndarray[Any, Any], *, largest: int = 127) -> Stored:
    rng = np.random.default_rng(0)
    return Stored(rng.integers(-largest - 1, largest + 1, (len(steps), 96)).astype(np.int16), steps)


RNG = np.random.default_rng(1)
SPREAD = np.exp(RNG.uniform(-9, 3, (40, 3)))


@pytest.mark.parametrize(
    "steps",
    [
        SPREAD.astype(np.float16),
        -SPREAD.astype(np.float16),
        SPREAD.astype(ml_dtypes.bfloat16).astype(np.float32),
        1e-20 * np.repeat(SPREAD[:, :1], 3, axis=1),
        np.zeros((40, 3)),
    ],
    ids=["float16", "negative", "bfloat16", "one for an output", "nothing"],
)
def test_steps_that_are_kept(steps: np.ndarray[Any, Any]) -> None:
    weight = drawn(steps)
    found = quantize_rows(Int8(), weight, slice(0, 40))
    assert isinstance(found, Quantized)
    np.testing.assert_array_equal(found.values, weight.integers(slice(0, 40)).values)
    np.testing.assert_array_equal(found.weight, weight[0:40])
    assert keeps_integers([WeightPart(Int8(), 0, 40)], weight)
    assert not keeps_integers([WeightPart(Int4(), 0, 40)], weight)


def test_rows_that_do_not_fit_are_rounded_and_their_neighbours_are_not() -> None:
    steps = SPREAD.astype(np.float16).astype(np.float32)
    steps[3] = SPREAD[3]  # of more digits than float16 has
    weight = drawn(steps)
    weight.integers(slice(7, 8)).values[0, 5] = 200
    whole = round_weight([WeightPart(Int8(), 0, 40)], weight, slice(0, 40))
    expected = weight[0:40]
    expected[[3, 7]] = Int8().quantize(expected[[3, 7]]).weight
    np.testing.assert_array_equal(whole, expected)
    np.testing.assert_array_equal(round_weight([WeightPart(Int8(), 0, 40)], weight, slice(5, 9)), whole[5:9])


def make_gguf_folder(path: Path, stored: str) -> Path:
    return make_gguf(path.with_suffix(".gguf"), stored=stored, **WIDTHS)


METHODS: dict[str, Callable[[], Method]] = {
    "gptq": gptq,
    "gptq-sym": lambda: gptq(symmetric=True),
    "gptq-v2": lambda: gptq(version=2),
    "gptq-int8": lambda: gptq(8, symmetric=True),
    "awq": lambda: awq(32),
    "awq-channel": lambda: awq(-1),
    "int8": lambda: whole_levels(symmetric=True),
    "packed-int4": lambda: packed_levels(4, symmetric=True),
    "packed-int4-asym": lambda: packed_levels(4, symmetric=False),
    "packed-int8": lambda: packed_levels(8, symmetric=True),
}


def make(path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    if method.startswith("Q"):
        return make_gguf_folder(path, method)
    monkeypatch.setattr(quantized_files, "GROUP", 32)
    make_quantized(path, METHODS[method](), **WIDTHS)
    return path


@pytest.mark.parametrize("method", [*METHODS, "Q8_0", "Q4_0", "Q5_0"])
def test_an_int8_engine_has_the_numbers_of_the_file(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path / "c", method, monkeypatch)
    with Checkpoint.open(path) as checkpoint:
        build = resolve(checkpoint, OPTIONS)
        inside = [name for name in build.quantized if name not in {"embed", "head"}]
        assert set(inside) <= set(build.kept) <= set(build.quantized)
        for name in inside:
            weight, expanded = build.weights.rows(name, "float16"), build.weights.load(name, "float32")
            rounded = round_weight(build.quantized[name], weight, slice(0, len(expanded)))
            np.testing.assert_array_equal(rounded, expanded)


@pytest.mark.parametrize("method", ["Q8_0", "Q4_0", "gptq", "int8"])
def test_the_engine_computes_with_them(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "c", method, monkeypatch)
    manifest = build_engine(path, tmp_path / "e", OPTIONS)
    assert manifest.device["kept_params"] >= 8
    result: SelfTestResult = verified(EngineDirectory.open(tmp_path / "e"))
    assert result.passed
    with Checkpoint.open(path) as checkpoint:
        write_expanded(checkpoint, tmp_path / "expanded")
    rounded = build_engine(tmp_path / "expanded", tmp_path / "rounded", OPTIONS)
    assert "kept_params" not in rounded.device
    assert rounded.engine_digest != manifest.engine_digest


@pytest.mark.parametrize("method", ["fp8-block", "packed-int8-ordered", "gptq"])  # the last with groups of 16
def test_what_is_no_multiple_of_steps_is_rounded(method: str, tmp_path: Path) -> None:
    make_quantized(tmp_path / "c", quantized_files.METHODS[method], **WIDTHS)
    with Checkpoint.open(tmp_path / "c") as checkpoint:
        build = resolve(checkpoint, OPTIONS)
    assert not build.kept
    assert any(note.startswith("rounded a second time, to int8:") for note in build.notes)


def test_how_many_are_kept_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path / "c", "gptq", monkeypatch)
    with caplog.at_level(logging.WARNING):
        manifest = build_engine(path, tmp_path / "e", OPTIONS)
    num_kept = manifest.device["kept_params"]
    total = num_kept + 2  # and both embeddings, which the file has in floats
    assert f"with the checkpoint's own integers and scales: {num_kept} of {total} weights; rounded" in caplog.text
    app = typer.Typer()
    app.command()(inspect_command.command)
    assert f"kept in {num_kept} weights" in CliRunner().invoke(app, [str(tmp_path / "e")]).output


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "c", "Q8_0", monkeypatch)
    damaged = bytearray(path.read_bytes())
    damaged[-34:-32] = np.float16(np.nan).tobytes()
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        build_engine(path, tmp_path / "e", OPTIONS)
