"""An engine from a GGUF file is the engine of the checkpoint that was converted."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.plan import plan_build
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.errors import CheckpointError
from llmserve.stages.files import TextFiles
from llmserve.stages.preprocess import Preprocessor, TextPrompt
from tests.builder.fake_target import FakeTarget
from tests.checkpoints import make_checkpoint
from tests.gguf_files import make_gguf

FLOAT32 = BuildOptions(dtype="float32")


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "mistral", "qwen2", "qwen3", "phi3"])
def test_the_engine_digest_is_that_of_the_folder(kind: str, tmp_path: Path) -> None:
    """It covers the network and every number, as they are computed with."""
    folder, file = make_checkpoint(tmp_path / "folder", kind), make_gguf(tmp_path / "m.gguf", kind)
    one = build_engine(folder, tmp_path / "one", FLOAT32, target=FakeTarget())
    other = build_engine(file, tmp_path / "other", FLOAT32, target=FakeTarget())
    assert one.engine_digest == other.engine_digest
    assert (other.source.files, other.source.architecture) == (("m.gguf",), one.source.architecture)


def test_the_directory_holds_what_serving_needs(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "m.gguf", "qwen2", tokenizer="bpe")
    manifest = build_engine(file, tmp_path / "e", FLOAT32, target=FakeTarget())
    assert sorted(manifest.files) == [
        "config.json", "generation_config.json", "hf_config.json", "program.txt", "rank0.engine", "selftest.npz",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    directory = EngineDirectory.open(tmp_path / "e")
    assert directory.hf_config["architectures"] == ["Qwen2ForCausalLM"]
    assert directory.generation_config["eos_token_id"] == [2, 0]
    assert TextFiles.read(tmp_path / "e").max_seq_len == 256
    assert Preprocessor.open(tmp_path / "e").prepare(TextPrompt("The river")).end_id == 2


def test_what_was_rounded_is_said_before_and_while_it_is_built(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = make_gguf(tmp_path / "m.gguf", stored="Q4_0", intermediate_size=192)
    plan = plan_build(file, FLOAT32, target=FakeTarget(), measure=lambda: 1e9)
    assert plan.checkpoint == "m.gguf"
    assert any("Q4_0" in note for note in plan.notes)
    assert any("no tokenizer.json or tokenizer.model" in note for note in plan.notes)
    with caplog.at_level(logging.WARNING):
        build_engine(file, tmp_path / "e", FLOAT32, target=FakeTarget())
    assert "100% Q4_0" in caplog.text or "99% Q4_0" in caplog.text


def test_a_bad_file_leaves_nothing(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "m.gguf")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"m\.gguf cannot be used: .*cut short"):
        build_engine(file, tmp_path / "e", FLOAT32, target=FakeTarget())
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
