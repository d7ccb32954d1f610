"""Engines for drafts whose head has only some tokens: they draft these as before, and answers stay as they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.engine.cpu.runner import CpuRunner
from llmserve.engine.directory.artifact import (
    DRAFT_VOCABULARY_FILE,
    MANIFEST_FILE,
    EngineDirectory,
    hash_file,
    rebuild_command,
)
from llmserve.engine.directory.manifest import FileRecord
from llmserve.engine.directory.selftest import prompt_logits
from llmserve.engine.open import open_engine
from llmserve.engine.registry import runtime_for
from llmserve.engine.settings import EngineSettings, GpuSettings
from llmserve.errors import EngineFileError, InternalError, NotFound, RecipeError, Unsupported
from llmserve.scheduler.drafts.acceptance import Acceptance
from llmserve.scheduler.drafts.drafter import Speculation
from llmserve.scheduler.plan import Chunk, SampleRequest, StepPlan
from tests.checkpoints import make_checkpoint
from tests.embedders import make_embedder
from tests.engine.cpu.test_speculation import GREEDY, answers, engine_dir, guided_requests, lookup_requests
from tests.gguf_files import make_gguf

__all__ = ["engine_dir"]

END = 2
CHOSEN = (5, 6, 7, *range(30, 200, 3))
OPTIONS = BuildOptions(dtype="float32", tokens_per_block=16, max_num_tokens=64, max_batch_size=16)
pytestmark = pytest.mark.usefixtures("rows_are_cheap")


def texts(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def short(options: BuildOptions, path: Path) -> BuildOptions:
    return replace(options, given={"draft_vocabulary": str(path)})


@pytest.fixture
def drafting_dir(engine_dir: Path, tmp_path: Path) -> Path:
    """The same network with a short head."""
    path = texts(tmp_path / "texts.jsonl", {"prompt_ids": CHOSEN[::-1]}, {"prompt_ids": [5, 5]})
    build_engine(engine_dir.parent / "checkpoint", tmp_path / "drafting", short(OPTIONS, path))
    return tmp_path / "drafting"


@pytest.mark.parametrize("quantization", ["", "int8", "int4"])
@pytest.mark.parametrize("kind", ["baichuan2-7b", "llama-tied", "phi"])  # rows are normalized, tied, have biases
def test_its_logits_are_those_of_its_tokens(kind: str, quantization: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", kind)
    options = replace(OPTIONS, quantization=quantization)
    path = texts(tmp_path / "texts.jsonl", {"prompt_ids": CHOSEN})
    build_engine(tmp_path / "checkpoint", tmp_path / "all", options)
    build_engine(tmp_path / "checkpoint", tmp_path / "some", short(options, path))
    directory = EngineDirectory.open(tmp_path / "some")
    assert directory.draft_vocabulary is not None
    tokens = directory.draft_vocabulary.tolist()
    assert tokens == sorted({*CHOSEN, END})
    logits = []
    for folder in ("all", "some"):
        runner = CpuRunner.open(EngineDirectory.open(tmp_path / folder).engine_file, num_blocks=8)
        logits.append(prompt_logits(runner, [300, 5, 7, 11, 250, 3], 0))
        runner.close()
    assert np.array_equal(logits[0][:, tokens], logits[1])
    assert runner.info.num_choices == len(tokens)
    result = runtime_for("cpu").selftest(directory)
    assert result is not None
    assert result.passed


def test_blocks_of_a_gguf_file_stay_as_they_are(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "m.gguf", "llama-tied", stored="Q4_K", hidden_size=256, intermediate_size=512)
    path = texts(tmp_path / "texts.jsonl", {"prompt_ids": CHOSEN})
    manifest = build_engine(file, tmp_path / "drafting", short(replace(OPTIONS, quantization="gguf"), path))
    assert manifest.device["kept_params"] == manifest.device["quantized_params"]
    result = runtime_for("cpu").selftest(EngineDirectory.open(tmp_path / "drafting"))
    assert result is not None
    assert result.passed


@pytest.mark.parametrize("is_guided", [False, True])
def test_answers_are_those_without_it(
    engine_dir: Path, drafting_dir: Path, is_guided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Acceptance, "num_likely", lambda drafter, threshold: 4)
    requests = guided_requests(engine_dir) if is_guided else lookup_requests()
    plain, without = answers(engine_dir, Speculation.OFF, requests)
    found, stats = answers(engine_dir, Speculation.DRAFT, requests, drafting_dir)
    assert found == plain
    if not is_guided:  # answers consist of its tokens
        assert (stats.total_accepted_tokens or 0) > (stats.total_drafted_tokens or 0) / 2
        assert stats.iteration < without.iteration / 2


def test_it_only_drafts(drafting_dir: Path) -> None:
    with pytest.raises(Unsupported, match="is an engine with a draft vocabulary; give it to --draft-engine"):
        open_engine(drafting_dir, EngineSettings())


def test_a_sample_can_only_name_tokens_of_the_head(drafting_dir: Path) -> None:
    directory = EngineDirectory.open(drafting_dir)
    runner, num_tokens = CpuRunner.open(directory.engine_file, num_blocks=8), len(CHOSEN) + 1

    def drawn(bias: tuple[int, float]) -> int:
        sample = SampleRequest(GREEDY, stream=0, position=1, bias=[bias])
        return runner.step(StepPlan((Chunk(1, [300], 0, [0], sample),))).tokens[0]

    assert drawn((num_tokens - 1, 1e6)) == num_tokens - 1
    with pytest.raises(InternalError, match="token id of a sample request"):
        drawn((num_tokens, 1.0))
    runner.close()


def test_the_digest_covers_the_tokens_but_no_path(engine_dir: Path, drafting_dir: Path, tmp_path: Path) -> None:
    checkpoint = engine_dir.parent / "checkpoint"
    first = EngineDirectory.open(drafting_dir).manifest
    assert "draft_vocabulary" not in json.dumps(first.options)
    same = texts(tmp_path / "same.jsonl", {"prompt_ids": sorted(CHOSEN)})
    assert build_engine(checkpoint, tmp_path / "same", short(OPTIONS, same)).engine_digest == first.engine_digest
    other = texts(tmp_path / "other.jsonl", {"prompt_ids": [*CHOSEN[:-1], 319]})
    assert build_engine(checkpoint, tmp_path / "other", short(OPTIONS, other)).engine_digest != first.engine_digest
    assert "--draft-vocabulary FILE" in rebuild_command(drafting_dir)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (np.array([5, 7], np.int32), "different sizes"),
        (np.array([7, 5], np.int32), "ascending order"),
        (np.array([5, 320], np.int32), "ascending order"),
        (np.array([[5, 7]], np.int32), "ascending order"),
        (np.array([5.0, 7.0]), "ascending order"),
        (b"something else", "cannot be read"),
    ],
)
def test_a_vocabulary_of_another_engine_is_refused(
    engine_dir: Path, drafting_dir: Path, content: Any, problem: str
) -> None:
    file, manifest = drafting_dir / DRAFT_VOCABULARY_FILE, EngineDirectory.open(drafting_dir).manifest
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        np.save(file, content)
    record = FileRecord(file.stat().st_size, hash_file(file))
    sealed = replace(manifest, files={**manifest.files, file.name: record})
    (drafting_dir / MANIFEST_FILE).write_text(sealed.to_json())
    with pytest.raises(EngineFileError, match=problem):
        open_engine(engine_dir, EngineSettings(gpu=GpuSettings(draft_engine=str(drafting_dir))))


def test_texts_are_encoded_as_prompts_are(engine_dir: Path, tmp_path: Path) -> None:
    path = texts(tmp_path / "texts.jsonl", {"text": "the cat sat on the mat"})
    build_engine(engine_dir.parent / "checkpoint", tmp_path / "drafting", short(OPTIONS, path))
    found = EngineDirectory.open(tmp_path / "drafting").draft_vocabulary
    assert found is not None
    assert END in found
    assert 4 < len(found) < 30


def test_what_cannot_be_done_is_refused(engine_dir: Path, tmp_path: Path) -> None:
    checkpoint, output = engine_dir.parent / "checkpoint", tmp_path / "drafting"
    wrong = texts(tmp_path / "wrong.jsonl", {"prompt_ids": [5, 320]}, {"words": "a"})
    with pytest.raises(RecipeError, match=r"the draft vocabulary .*cannot be used(.|\n)*token id 320(.|\n)*'words'"):
        build_engine(checkpoint, output, short(OPTIONS, wrong))
    with pytest.raises(NotFound, match=r"the draft vocabulary .* does not exist"):
        build_engine(checkpoint, output, short(OPTIONS, tmp_path / "nothing"))
    fine = texts(tmp_path / "fine.jsonl", {"prompt_ids": [5]})
    with pytest.raises(RecipeError, match=r"draft_vocabulary .* is for the cpu target"):
        build_engine(checkpoint, output, short(replace(OPTIONS, target="cuda"), fine))
    make_embedder(tmp_path / "embedder", "bert", pooling="mean")
    with pytest.raises(RecipeError, match="no effect on a network that generates no tokens"):
        build_engine(tmp_path / "embedder", output, short(replace(OPTIONS, max_num_tokens=2048), fine))
    assert not output.exists()
