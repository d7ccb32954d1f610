"""Embeddings and scores against transformers: the numpy reference, and the compiled engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.plan import plan_build
from llmserve.engine.cpu.runner import CpuRunner
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.registry import runtime_for
from llmserve.scheduler.plan import Chunk, StepPlan
from llmserve.stages.files import TextFiles
from tests.checkpoints import KINDS, make_checkpoint, random_tensors, write_json
from tests.embedders import (
    EMBEDDERS,
    POOLINGS,
    RERANKERS,
    make_embedder,
    make_reranker,
    wanted_embedding,
    wanted_score,
    write_answers,
)
from tests.gguf_encoders import convert_encoder
from tests.gguf_files import Changes, make_gguf
from tests.oracle import load_oracle, oracle_logits, reference_logits

NUM_BLOCKS = 32
PROMPTS = ((5, 17, 200, 31, 9), tuple(range(3, 60)), (250,), tuple(range(300, 236, -1)))


def built(checkpoint: Path, dtype: str = "float32", quantization: str = "") -> EngineDirectory:
    options = BuildOptions(dtype=dtype, quantization=quantization, tokens_per_block=16)
    path = (checkpoint if checkpoint.is_dir() else checkpoint.parent) / "engine"
    build_engine(checkpoint, path, options)
    return EngineDirectory.open(path)


def pooled(engine: EngineDirectory, *texts: Sequence[int], second_segment: int = 0) -> list[NDArray[np.float32]]:
    """All in one step."""
    runner = CpuRunner.open(engine.engine_file, num_blocks=NUM_BLOCKS)
    chunks, blocks = [], iter(range(NUM_BLOCKS))
    for index, text in enumerate(texts):
        table = [next(blocks) for _ in range(-(-len(text) // 16))]
        chunks.append(Chunk(index, text, 0, table, pooled=True, second_segment=second_segment))
    found = runner.step(StepPlan(tuple(chunks))).logits
    runner.close()
    return [found[index][0] for index in range(len(texts))]


def relative_error(found: Any, wanted: Any) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("kind", EMBEDDERS)
def test_embeddings_are_those_of_transformers(kind: str, pooling: str, tmp_path: Path) -> None:
    normalize = pooling in ("mean", "lasttoken")
    model = make_embedder(tmp_path, kind, pooling=pooling, normalize=normalize)
    engine = built(tmp_path)
    for ids, found in zip(PROMPTS, pooled(engine, *PROMPTS), strict=True):
        wanted = wanted_embedding(model, ids, pooling, normalize=normalize)
        assert relative_error(found, wanted) < 1e-4
    test = runtime_for(engine.manifest.target).selftest(engine)
    assert test is not None
    assert test.passed, str(test)


@pytest.mark.parametrize("kind", RERANKERS)
def test_scores_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = make_reranker(tmp_path, kind)
    engine = built(tmp_path)
    for second_segment in (0, 4) if kind.startswith("bert") else (0,):
        found = pooled(engine, *PROMPTS, second_segment=second_segment)
        for ids, score in zip(PROMPTS, found, strict=True):
            assert score == pytest.approx([wanted_score(model, ids, second_segment)], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(("kind", "pooling"), [("bert", "mean"), ("bert-one-layer", "cls"), ("xlm-r-odd", "mean")])
def test_embeddings_of_a_gguf_file_are_those_of_transformers(kind: str, pooling: str, tmp_path: Path) -> None:
    model = make_embedder(tmp_path, kind)
    found = pooled(built(convert_encoder(tmp_path / "m.gguf", tmp_path, pooling)), *PROMPTS)
    for ids, vector in zip(PROMPTS, found, strict=True):
        assert relative_error(vector, wanted_embedding(model, ids, pooling, normalize=True)) < 1e-4


@pytest.mark.parametrize(("tied", "quantization"), [(True, ""), (False, ""), (True, "int8")])
def test_a_score_is_the_difference_of_two_answers(tied: bool, quantization: str, tmp_path: Path) -> None:
    """Of Qwen3-Reranker: before the sigmoid, the logit of yes minus that of no."""
    make_checkpoint(tmp_path, "qwen3", dtype="float32", tie_word_embeddings=tied)
    write_answers(tmp_path, yes=41, no=300)
    model = load_oracle(tmp_path)
    engine = built(tmp_path, "float16" if quantization else "float32", quantization)
    assert engine.info().scores_with_sigmoid
    for ids, score in zip(PROMPTS, pooled(engine, *PROMPTS), strict=True):
        logits = oracle_logits(model, ids)[-1]
        near = 0.1 if quantization else 1e-4
        assert score == pytest.approx([logits[41] - logits[300]], rel=near, abs=near)


def test_two_answers_of_a_gguf_file(tmp_path: Path) -> None:
    """As llama.cpp converts Qwen3-Reranker: the file has the head's rows of yes and no, and the prompt of a pair."""
    logits = reference_logits(make_gguf(tmp_path / "plain.gguf", "qwen3", tokenizer="bpe"))
    head = random_tensors(KINDS["qwen3"], dtype="float32", seed=0)["lm_head.weight"]
    metadata = {"qwen3.pooling_type": 4, "tokenizer.chat_template.rerank": "q {query} d {document}"}
    changes = Changes(added={"cls.output.weight": head[[41, 300]]})
    path = make_gguf(tmp_path / "m.gguf", "qwen3", tokenizer="bpe", metadata=metadata, changes=changes)
    engine = built(path)
    assert engine.info().scores_with_sigmoid
    assert TextFiles.read(engine.path).pair_template == "q {query} d {document}"
    for ids, score in zip(PROMPTS, pooled(engine, *PROMPTS), strict=True):
        row = logits(ids)[-1]
        assert score == pytest.approx([row[41] - row[300]], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(("make", "noted"), [(make_embedder, True), (make_reranker, False)])
def test_a_build_notes_the_default_prompt_of_an_embedder(make: Any, noted: bool, tmp_path: Path) -> None:
    make(tmp_path, "bert")
    settings = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    write_json(tmp_path / "config_sentence_transformers.json", settings)
    assert any("'query: '" in note for note in plan_build(tmp_path, BuildOptions()).notes) is noted


def test_scores_of_a_gguf_file_are_those_of_transformers(tmp_path: Path) -> None:
    model = make_reranker(tmp_path, "xlm-r")
    found = pooled(built(convert_encoder(tmp_path / "m.gguf", tmp_path, "rank")), *PROMPTS)
    for ids, score in zip(PROMPTS, found, strict=True):
        assert score == pytest.approx([wanted_score(model, ids, 0)], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(("dtype", "quantization"), [("float32", ""), ("bfloat16", ""), ("float16", "int8")])
@pytest.mark.parametrize("kind", ["bert-odd", "xlm-r", "qwen3"])
def test_an_embedding_does_not_depend_on_its_company(kind: str, dtype: str, quantization: str, tmp_path: Path) -> None:
    make_embedder(tmp_path, kind, pooling="lasttoken" if kind == "qwen3" else "mean", normalize=True)
    engine = built(tmp_path, dtype, quantization)
    together = pooled(engine, *PROMPTS)
    for ids, found in zip(PROMPTS, together, strict=True):
        np.testing.assert_array_equal(pooled(engine, ids)[0], found)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["bert", "xlm-r-odd", "qwen3"])
def test_rounded_embeddings_point_the_same_way(kind: str, quantization: str, tmp_path: Path) -> None:
    model = make_embedder(tmp_path, kind, pooling="lasttoken" if kind == "qwen3" else "mean", normalize=True)
    engine = built(tmp_path, "float16", quantization)
    for ids, found in zip(PROMPTS, pooled(engine, *PROMPTS), strict=True):
        pooling = "lasttoken" if kind == "qwen3" else "mean"
        wanted = wanted_embedding(model, ids, pooling, normalize=True)
        assert found @ wanted > (0.99 if quantization == "int8" else 0.9)
