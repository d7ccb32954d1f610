"""Engines with the mistakes that people make: the smallest suite of the project, with its own margins, lets none pass.

Each defect is planted in what the engine is built from; the baseline is that of the sound checkpoint.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.quantization import Int4, Quantized
from llmserve.errors import InvalidArgument
from llmserve.evaluation.baseline import hf
from llmserve.evaluation.judging.gate import Verdict
from llmserve.evaluation.reporting.report import Report
from llmserve.evaluation.run import EvalOptions, evaluate
from llmserve.evaluation.served.run import ServedOptions
from llmserve.models import baichuan
from llmserve.models.alibi import alibi_slopes
from llmserve.models.rope import default_rope
from llmserve.models.spec import DecoderSpec
from tests.e2e.conftest import CHECKPOINT, ROOT
from tests.evaluation.served.defects import command

SUITE = ROOT / "eval" / "suites" / "docstrings-smoke.yaml"
PLAIN = (sys.executable, "-m", "llmserve.cli.owned_server")
OPTIONS = BuildOptions(dtype="float16", max_seq_len=512)
NUM_HEADS, HEAD_DIM, HIDDEN = 4, 64, 256
Tensors = dict[str, np.ndarray[Any, Any]]


class Silent:
    def phase(self, name: str, total: int) -> Callable[[int], None]:
        return lambda count: None


def judged(engine: Path, checkpoint: Path = CHECKPOINT, suite: Path = SUITE) -> Report:
    return evaluate(EvalOptions(suite, checkpoint, engine=engine), Silent())


def changed(folder: Path, change: Callable[[Tensors], None] = lambda tensors: None, **config: Any) -> Path:
    """A copy of the demo's checkpoint with other weights, or another config."""
    shutil.copytree(CHECKPOINT, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        content = {**json.loads((folder / name).read_text()), **config}
        content = {key: value for key, value in content.items() if value is not None}
        (folder / name).write_text(json.dumps(content))
    return folder


def a_layer_is_damaged(tensors: Tensors) -> None:
    """The rows of one projection, off by one."""
    name = "model.layers.3.self_attn.o_proj.weight"
    tensors[name] = np.roll(tensors[name], 1, axis=0)


def q_and_k_are_swapped(tensors: Tensors) -> None:
    for layer in range(6):
        name = f"model.layers.{layer}.self_attn.W_pack.weight"
        q, k, v = np.split(tensors[name], 3)
        tensors[name] = np.concatenate([k, q, v])


def two_rows_are_swapped(tensors: Tensors) -> None:
    weight = tensors["model.layers.3.mlp.up_proj.weight"]
    weight[[10, 11]] = weight[[11, 10]]


def attention_is_one_percent_too_sharp(tensors: Tensors) -> None:
    for layer in range(6):
        name = f"model.layers.{layer}.self_attn.W_pack.weight"
        q, k, v = np.split(tensors[name], 3)
        tensors[name] = np.concatenate([(q.astype(np.float32) * 1.01).astype(q.dtype), k, v])


def queries_are_one_position_ahead(tensors: Tensors) -> None:
    """The rotation by one position, done before that by their own."""
    angles = 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    for layer in range(6):
        name = f"model.layers.{layer}.self_attn.W_pack.weight"
        weight = tensors[name].astype(np.float32)
        for head in range(NUM_HEADS):
            rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            low, high = np.split(weight[rows], 2)
            weight[rows] = np.concatenate([low * cos - high * sin, high * cos + low * sin])
        tensors[name] = weight.astype(tensors[name].dtype)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planted")


def test_the_sound_engine_passes(folder: Path) -> None:
    build_engine(CHECKPOINT, folder / "sound", OPTIONS)
    report = judged(folder / "sound")
    assert (report.passed, report.gate.verdict) == (True, Verdict.PASS)


@pytest.mark.parametrize(
    "plant",
    [
        a_layer_is_damaged,
        q_and_k_are_swapped,
        two_rows_are_swapped,
        attention_is_one_percent_too_sharp,
        queries_are_one_position_ahead,
    ],
)
def test_wrong_weights_fail(plant: Callable[[Tensors], None], folder: Path) -> None:
    name = plant.__name__
    build_engine(changed(folder / name, plant), folder / f"{name}-engine", OPTIONS)
    assert_fails(judged(folder / f"{name}-engine"))


def test_a_norm_head_that_was_not_folded_fails(folder: Path) -> None:
    """The demo's head has rows of length one, so others are given to it: the same network, once they are folded."""

    def lengthen(tensors: Tensors) -> None:
        lengths = np.random.default_rng(3).uniform(0.9, 1.1, len(tensors["lm_head.weight"]))
        tensors["lm_head.weight"] = (tensors["lm_head.weight"] * lengths[:, None]).astype(np.float16)

    build_engine(changed(folder / "head", lengthen, norm_head=False), folder / "head-engine", OPTIONS)
    assert_fails(judged(folder / "head-engine"))


def test_a_wrong_rope_base_fails(folder: Path) -> None:
    with patch.object(baichuan, "default_rope", lambda head_dim, theta: default_rope(head_dim, 1.01 * theta)):
        build_engine(CHECKPOINT, folder / "rope", OPTIONS)
    assert_fails(judged(folder / "rope"))


def test_a_window_that_the_network_does_not_have_fails(folder: Path) -> None:
    """In its last layer: no earlier than behind 256 tokens."""
    with patch.object(DecoderSpec, "window", lambda self, layer: 256 if layer == 5 else 0):
        build_engine(CHECKPOINT, folder / "window", OPTIONS)
    assert_fails(judged(folder / "window"))


def test_scales_that_are_off_by_one_group_fail(folder: Path) -> None:
    sound = Int4.quantize

    def shifted(self: Int4, rows: Any, begin: int = 0) -> Quantized:
        found = sound(self, rows, begin)
        found.scales[:] = np.roll(found.scales, 1, axis=1)
        return found

    with patch.object(Int4, "quantize", shifted):
        build_engine(CHECKPOINT, folder / "int4", BuildOptions(quantization="int4", max_seq_len=512))
    assert_fails(judged(folder / "int4"))


@pytest.mark.parametrize(("plant", "fails"), [("", False), ("apply_temperature_twice()", True)])
def test_a_temperature_that_is_applied_twice_fails(plant: str, fails: bool, folder: Path) -> None:
    """Greedy answers, and those at a temperature of 1, are as they should be."""
    engine = folder / f"drawn-{plant}"
    build_engine(CHECKPOINT, engine, OPTIONS)
    served = ServedOptions(command(plant) if plant else PLAIN, num_samples=8)
    report = evaluate(EvalOptions(SUITE, CHECKPOINT, engine=engine, served=served), Silent())
    assert report.served is not None
    failed = [result.name for result in report.served.results if result.verdict is Verdict.FAIL]
    assert failed == (["drawn"] if fails else [])
    assert report.passed is not fails


def test_a_chat_format_without_role_ids_is_no_comparison(folder: Path) -> None:
    other = changed(folder / "roles", user_token_id=197, assistant_token_id=198)
    build_engine(other, folder / "roles-engine", OPTIONS)
    with pytest.raises(InvalidArgument, match="the engine and the baseline get different prompts"):
        judged(folder / "roles-engine")


@pytest.fixture(scope="module")
def alibi(folder: Path) -> tuple[Path, Path]:
    """The same weights under ALiBi, which is another network; and the suite with a folder for its baseline."""
    if not hf.is_available():
        pytest.skip("the baseline of another network needs torch")
    suite = folder / "suite" / "smoke.yaml"
    suite.parent.mkdir()
    changes = {"../data": str(ROOT / "eval" / "data"), "../baselines": ".", "samples: 50": "samples: 8"}
    text = SUITE.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    suite.write_text(text.replace("max_tokens: 32", "max_tokens: 12"))
    return changed(folder / "alibi", position_embedding="alibi", rope_theta=None), suite


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_one_wrong_slope_of_alibi_fails(factor: float, alibi: tuple[Path, Path], folder: Path) -> None:
    checkpoint, suite = alibi
    first, *others = alibi_slopes(NUM_HEADS)
    engine = folder / f"alibi-{factor}"
    with patch.object(baichuan, "alibi_slopes", lambda num_heads: (first * factor, *others)):
        build_engine(checkpoint, engine, OPTIONS)
    report = judged(engine, checkpoint, suite)
    if factor == 1.0:
        assert all(result.interval.high <= result.margin for result in report.gate.losses if result.margin is not None)
    else:
        assert_fails(report)


def assert_fails(report: Report) -> None:
    assert (report.passed, report.gate.verdict) == (False, Verdict.FAIL), report.gate.reasons
