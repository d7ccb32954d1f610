"""`llmserve build --calibration-data`, from the file to the manifest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmserve.builder import pieces
from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.cli.build import default_output_dir
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.manifest import Manifest
from llmserve.engine.directory.verify import verify_engine
from llmserve.errors import RecipeError
from tests.builder.contents import contents
from tests.checkpoints import KINDS, MIXTURES, WITH_STATES, make_checkpoint, random_tensors, write_tensors
from tests.engine.cpu.networks import random_ids
from tests.gguf_files import make_gguf

OPTIONS = BuildOptions(dtype="float16", max_num_tokens=64, quantization="int4")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", "llama")


def write(file: Path, *, count: int = 40) -> Path:
    lines = [{"prompt_ids": random_ids(320, 60, seed)} for seed in range(count)]
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"text": "The river is wide"}]))
    return file


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_same_file_makes_the_same_bytes_with_any_number_of_threads(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS", 32 * 64)
    options = replace(OPTIONS, quantization=quantization)
    made = []
    for threads, name in ((1, "a.jsonl"), (2, "b.jsonl"), (5, "c.jsonl")):
        data = str(write(tmp_path / name))
        build_engine(checkpoint, tmp_path / "e", replace(options, calibration_data=data), threads=threads)
        made.append(contents(tmp_path / "e"))
    assert made[0] == made[1] == made[2]
    result = verify_engine(EngineDirectory.open(tmp_path / "e"))
    assert result is not None
    assert result.passed
    build_engine(checkpoint, tmp_path / "plain", options)
    assert contents(tmp_path / "plain")["rank0.engine"] != made[0]["rank0.engine"]


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(MIXTURES)))
def test_every_architecture_can_be_calibrated(tmp_path: Path, kind: str) -> None:
    folder = make_checkpoint(tmp_path / "c", kind)
    options = replace(OPTIONS, calibration_data=str(write(tmp_path / "a.jsonl")), max_seq_len=64)
    build_engine(folder, tmp_path / "e", options)
    result = verify_engine(EngineDirectory.open(tmp_path / "e"))
    assert result is not None
    assert result.passed
    assert result.tolerance < (0.6 if kind in (*WITH_STATES, "gemma4") else 0.3)


@pytest.mark.parametrize("kind", ["olmoe", "qwen2-moe", "gpt-oss", "llama4-moe", "deepseek-v3-moe"])
def test_mixtures_of_experts_can_be_calibrated(tmp_path: Path, kind: str) -> None:
    folder = make_checkpoint(tmp_path / "c", kind)
    options = replace(OPTIONS, calibration_data=str(write(tmp_path / "a.jsonl")), max_seq_len=64)
    manifest = build_engine(folder, tmp_path / "e", options)
    assert manifest.calibration is not None
    assert verified(tmp_path / "e")


def verified(engine: Path) -> bool:
    result = verify_engine(EngineDirectory.open(engine))
    return result is not None and result.passed


def test_the_manifest_and_the_digest_know_the_text(checkpoint: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl")
    other = tmp_path / "b.jsonl"
    other.write_bytes(data.read_bytes() + b"\n")
    manifests = [
        build_engine(checkpoint, tmp_path / "e", replace(OPTIONS, calibration_data=name))
        for name in ("", str(data), str(other))
    ]
    plain, one, two = manifests
    assert plain.calibration is None
    assert one.calibration is not None
    assert one.calibration.sha256 == hashlib.sha256(data.read_bytes()).hexdigest()
    assert (one.calibration.lines, one.calibration.tokens >= 2400) == (41, True)
    assert plain.loss is not None
    assert one.loss is not None
    assert one.loss.divergence > 0
    assert len({manifest.engine_digest for manifest in manifests}) == 3
    assert one.options == plain.options, "where the file was is nobody's business"
    assert str(tmp_path) not in one.to_json()
    assert EngineDirectory.open(tmp_path / "e").manifest == two
    assert Manifest.from_json(two.to_json()) == two


def test_what_rounding_costs_is_known_where_something_is_rounded_and_text_can_be_read(
    checkpoint: Path, tmp_path: Path
) -> None:
    silent = make_checkpoint(tmp_path / "silent", "llama", with_tokenizer=False)
    assert build_engine(silent, tmp_path / "e", OPTIONS).loss is None
    assert build_engine(checkpoint, tmp_path / "e", replace(OPTIONS, quantization="")).loss is None
    loss = build_engine(checkpoint, tmp_path / "e", replace(OPTIONS, max_seq_len=50)).loss
    assert loss is not None
    assert loss.positions == 50


@pytest.mark.parametrize(
    ("kind", "quantization", "share"), [("llama", "int8", 0.9), ("llama", "int4", 0.5), ("mixtral", "int4", 0.25)]
)
def test_a_network_whose_inputs_hang_together_loses_less(
    tmp_path: Path, kind: str, quantization: str, share: float
) -> None:
    """As those of trained networks do: embeddings that are mixtures of a few things, and little of their own.

    What an embedding in eight bits costs is not calibrated, and most of what is left of int8's loss. Without feedback
    in experts, a mixture would keep more than a third of its loss; with it in their first matrices only, 0.27.
    """
    folder = make_checkpoint(tmp_path / "c", kind)
    tensors = random_tensors(KINDS[kind], dtype="float32", seed=0)
    embedding, rng = tensors["model.embed_tokens.weight"], np.random.default_rng(1)
    mixed = rng.standard_normal((len(embedding), 6)) @ rng.standard_normal((6, embedding.shape[1]))
    tensors["model.embed_tokens.weight"] = (mixed + 0.1 * embedding).astype(np.float32)
    write_tensors(folder, tensors, "safetensors")
    options = replace(OPTIONS, quantization=quantization)
    calibrated = replace(options, calibration_data=str(write(tmp_path / "a.jsonl", count=100)))
    plain, mended = (build_engine(folder, tmp_path / "e", each).loss for each in (options, calibrated))
    assert plain is not None
    assert mended is not None
    assert mended.divergence < share * plain.divergence


def test_integers_that_are_kept_need_no_text(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "m.gguf", "qwen3", stored="Q8_0", tokenizer="bpe", intermediate_size=192)
    options = replace(OPTIONS, calibration_data=str(write(tmp_path / "a.jsonl")))
    with pytest.raises(RecipeError, match="every weight keeps the checkpoint's integers"):
        build_engine(file, tmp_path / "e", replace(options, quantization="int8"))
    assert build_engine(file, tmp_path / "e", options).calibration is not None


def test_an_engine_of_its_own_directory() -> None:
    options = replace(OPTIONS, calibration_data="a.jsonl")
    assert default_output_dir(Path("a/b"), options) == Path("engines/b-fp16-int4-calibrated")
