"""Phi-3's two sets of frequencies: which one an engine has follows from its longest sequence."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.plan import plan_build
from llmserve.engine.cpu.runner import CpuRunner
from llmserve.engine.directory.artifact import EngineDirectory
from tests.checkpoints import make_checkpoint
from tests.engine.cpu.networks import all_logits, random_ids
from tests.oracle import load_oracle, oracle_logits, relative_error

ORIGINAL = 128  # positions of the first training, in the tests' phi4-mini


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "phi4-mini", "phi4-mini")


@pytest.mark.parametrize(("max_seq_len", "length"), [(0, ORIGINAL), (ORIGINAL + 72, ORIGINAL + 72)])
def test_each_set_is_that_of_transformers(max_seq_len: int, length: int, checkpoint: Path, tmp_path: Path) -> None:
    options = BuildOptions(dtype="float32", max_seq_len=max_seq_len, max_num_tokens=256)
    build_engine(checkpoint, tmp_path / "engine", options)
    directory = EngineDirectory.open(tmp_path / "engine")
    assert directory.info().max_seq_len == length
    runner = CpuRunner.open(directory.engine_file, num_blocks=16)
    ids = random_ids(320, length)
    assert relative_error(all_logits(runner, ids), oracle_logits(load_oracle(checkpoint), ids)) < 1e-4
    runner.close()


def test_the_build_says_which_set_it_takes(checkpoint: Path) -> None:
    usual, long = (plan_build(checkpoint, BuildOptions(max_seq_len=n), measure=lambda: 1e9) for n in (0, 200))
    assert usual.options.max_seq_len == ORIGINAL
    assert any("sequences of 256 tokens (--max-seq-len)" in note for note in usual.notes)
    assert any("with the long factors" in note and "max_seq_len 200" in note for note in long.notes)
    assert usual.program != long.program
