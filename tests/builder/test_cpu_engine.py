"""Checkpoint to logits through everything real: reader, builder, CPU target, CPU runner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.plan import plan_build
from llmserve.engine.artifact import SELFTEST_FILE, EngineDirectory
from llmserve.engine.cpu.runner import CpuRunner, kv_bytes_per_block, read_header
from llmserve.engine.manifest import Manifest
from llmserve.engine.selftest import SelfTest, prompt_logits
from llmserve.engine.verify import verify_engine
from llmserve.errors import Unsupported
from tests.checkpoints import KINDS, make_checkpoint
from tests.engine.directories import seal

OPTIONS = BuildOptions(dtype="float32", max_num_tokens=16, tokens_per_block=16)


def build(path: Path, kind: str, options: BuildOptions = OPTIONS) -> EngineDirectory:
    build_engine(make_checkpoint(path / kind, kind), path / "engine", options)
    return EngineDirectory.open(path / "engine")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_architecture_computes_the_references_logits(tmp_path: Path, kind: str) -> None:
    result = verify_engine(build(tmp_path, kind))
    assert result.passed
    assert result.max_error < 1e-4


@pytest.mark.parametrize("kind", ["baichuan2-7b", "baichuan2-13b", "qwen3"])
@pytest.mark.parametrize(("dtype", "quantization"), [("float16", ""), ("bfloat16", ""), ("float16", "int8")])
def test_rounded_engines_stay_within_a_third_of_the_tolerance(
    tmp_path: Path, kind: str, dtype: str, quantization: str
) -> None:
    options = replace(OPTIONS, dtype=dtype, quantization=quantization)
    result = verify_engine(build(tmp_path, kind, options))
    assert result.passed
    assert result.max_error < result.tolerance / 3


@pytest.mark.parametrize("quantization", ["", "int8"])
def test_two_builds_have_the_same_bytes(tmp_path: Path, quantization: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "c", "qwen2", dtype="bfloat16")
    for name in ("one", "two"):
        build_engine(checkpoint, tmp_path / name, BuildOptions(quantization=quantization))
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two")]
    assert files[0] == files[1]


def test_the_plan_says_what_the_engine_is(tmp_path: Path) -> None:
    directory = build(tmp_path, "llama")
    plan = plan_build(tmp_path / "llama", OPTIONS, measure=lambda: 1.0)
    header = read_header(directory.engine_file)
    assert plan.engine_bytes == pytest.approx(directory.engine_file.stat().st_size, rel=0.1)
    assert plan.kv_bytes_per_token * header.block_size == kv_bytes_per_block(header)


def test_a_sealed_engine_with_damaged_weights_fails_its_selftest(tmp_path: Path) -> None:
    """Damage that every digest agrees with: only running the engine can tell."""
    directory = build(tmp_path, "llama")
    content = bytearray(directory.engine_file.read_bytes())
    middle = len(content) // 2 // 4 * 4
    weights = np.frombuffer(content, np.float32, count=2000, offset=middle)
    weights.setflags(write=True)
    weights *= 3
    directory.engine_file.write_bytes(content)
    seal(directory.path, directory.manifest)
    assert not verify_engine(EngineDirectory.open(directory.path)).passed


def test_a_self_test_of_another_engine_fails(tmp_path: Path) -> None:
    directory = build(tmp_path, "llama")
    checkpoint = make_checkpoint(tmp_path / "other", "llama", seed=5)
    build_engine(checkpoint, tmp_path / "other-engine", OPTIONS)
    (directory.path / SELFTEST_FILE).write_bytes((tmp_path / "other-engine" / SELFTEST_FILE).read_bytes())
    seal(directory.path, directory.manifest)
    result = verify_engine(EngineDirectory.open(directory.path))
    assert not result.passed
    assert "FAILED" in str(result)


def test_engines_of_other_targets_are_not_run(tmp_path: Path) -> None:
    directory = build(tmp_path, "llama")
    seal(directory.path, replace(directory.manifest, target="tensorrt_llm"))
    with pytest.raises(Unsupported, match="tensorrt_llm"):
        verify_engine(EngineDirectory.open(directory.path))


def test_the_engine_answers_the_same_whatever_the_chunks(tmp_path: Path) -> None:
    """The self-test's prompts cross chunk and block borders; one chunk for all must give the same bits."""
    small = build(tmp_path, "baichuan2-7b")
    build_engine(tmp_path / "baichuan2-7b", tmp_path / "large", replace(OPTIONS, max_num_tokens=512))
    (*_, prompt) = SelfTest.load(small.path / SELFTEST_FILE).prompts()
    rows = []
    for directory in (small, EngineDirectory.open(tmp_path / "large")):
        runner = CpuRunner.open(directory.engine_file, num_blocks=8)
        rows.append(prompt_logits(runner, prompt, 0))
        runner.close()
    assert len(prompt) > 32
    np.testing.assert_array_equal(rows[0], rows[1])


def test_the_manifest_names_the_device(tmp_path: Path) -> None:
    manifest: Manifest = build(tmp_path, "llama").manifest
    assert manifest.target == "cpu"
    assert manifest.device
