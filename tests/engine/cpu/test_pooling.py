"""An engine that makes embeddings or scores: many texts in flight, and what it refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.reference import Run
from llmserve.builder.resolve import resolve_network
from llmserve.checkpoint.reader import read_config
from llmserve.core import GenerateRequest, SamplingParams, TokenEvent
from llmserve.engine.cpu.runner import CpuRunner
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.open import open_engine
from llmserve.errors import CheckpointError, InvalidArgument, LlmserveError, PromptTooLong, RecipeError
from llmserve.models.spec import Pooling, without_head
from llmserve.scheduler.plan import Chunk, StepPlan
from tests.embedders import make_embedder, make_reranker, wanted_embedding
from tests.engine.cpu.conftest import POOLING, EngineFile, OpenRunner
from tests.engine.cpu.law import FORMATS
from tests.engine.cpu.networks import LIMITS, odd_network, random_ids
from tests.sealed_adapters import random_parts, sealed

LONGEST = 64  # positions of the network
TEXTS = [tuple(range(3, 3 + length)) for length in (1, 5, 17, 33, LONGEST, 2, 64, 9, 40, 7)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("embedder")
    make_embedder(path, "bert", pooling="mean", normalize=True)
    return path


@pytest.fixture(scope="module")
def engine_dir(checkpoint: Path) -> Path:
    """Whose steps have room for the longest text, and for no more."""
    return built(checkpoint, checkpoint / "engine", max_num_tokens=LONGEST)


def built(checkpoint: Path, path: Path, **options: Any) -> Path:
    build_engine(checkpoint, path, BuildOptions(dtype="float32", tokens_per_block=16, **options))
    return path


def pooled(ids: Sequence[int], **more: Any) -> GenerateRequest:
    return GenerateRequest("text", tuple(ids), SamplingParams(max_tokens=1), pooled=True, **more)


async def events_of(engine: Any, request: GenerateRequest) -> list[TokenEvent]:
    return [event async for event in engine.submit(request)]


def answers(engine_dir: Path, *requests: GenerateRequest) -> list[NDArray[np.float32]]:
    """All at once; each is one event without tokens."""

    async def ask() -> list[list[TokenEvent]]:
        engine = open_engine(engine_dir)
        try:
            return await asyncio.gather(*(events_of(engine, request) for request in requests))
        finally:
            engine.close()

    found = []
    for request, (event,) in zip(requests, asyncio.run(ask()), strict=True):
        assert event.token_ids == ()
        assert event.usage is not None
        assert (event.usage.prompt_tokens, event.usage.completion_tokens) == (len(request.prompt_ids), 0)
        (vector,) = event.logits
        found.append(vector)
    return found


def refusal(engine_dir: Path, request: GenerateRequest) -> LlmserveError:
    with pytest.raises(InvalidArgument) as caught:
        answers(engine_dir, request)
    return caught.value


def test_many_texts_in_flight_have_the_embeddings_that_each_has_alone(checkpoint: Path, engine_dir: Path) -> None:
    from transformers import AutoModel

    together = answers(engine_dir, *map(pooled, TEXTS * 4))
    model = AutoModel.from_pretrained(checkpoint)
    for ids, found in zip(TEXTS * 4, together, strict=True):
        np.testing.assert_array_equal(answers(engine_dir, pooled(ids))[0], found)
        wanted = wanted_embedding(model, ids, "mean", normalize=True)
        assert found @ wanted == pytest.approx(1, abs=1e-5)


def test_a_decoder_finds_prefixes_and_pools_the_same(tmp_path: Path) -> None:
    model = make_embedder(tmp_path, "qwen3", pooling="lasttoken", normalize=True)
    config = json.loads((tmp_path / "config.json").read_text())  # as Qwen3-Embedding is published: no "model." in names
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    engine_dir = built(tmp_path, tmp_path / "engine", max_num_tokens=16)  # a long text is several steps

    async def ask() -> list[TokenEvent]:
        engine = open_engine(engine_dir)
        try:
            return [event for _ in range(2) for event in await events_of(engine, pooled(TEXTS[4]))]
        finally:
            engine.close()

    first, second = asyncio.run(ask())
    assert first.usage is not None
    assert second.usage is not None
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 48)
    np.testing.assert_array_equal(first.logits[0], second.logits[0])
    assert first.logits[0] @ wanted_embedding(model, TEXTS[4], "lasttoken", normalize=True) > 1 - 1e-5


def test_what_the_engine_cannot_do_is_refused(checkpoint: Path, engine_dir: Path, tmp_path: Path) -> None:
    error = refusal(engine_dir, pooled(range(3, 4 + LONGEST)))
    assert isinstance(error, PromptTooLong)
    assert "the text has 65 tokens, but this engine takes at most 64" in str(error)
    error = refusal(engine_dir, GenerateRequest("r", (1, 2), SamplingParams(max_tokens=4)))
    assert "this engine makes embeddings or scores of texts, not tokens" in str(error)
    assert "second_segment must be a position" in str(refusal(engine_dir, pooled((1, 2), second_segment=2)))
    make_embedder(tmp_path, "qwen3")
    tokens = built(tmp_path, tmp_path / "engine")
    assert "this engine makes tokens, not embeddings or scores" in str(refusal(tokens, pooled((1, 2))))


def test_an_encoder_keeps_no_more_than_a_step_needs(engine_dir: Path) -> None:
    """Other engines have room for the largest batch of their longest sequences: 256 blocks."""
    engine = open_engine(engine_dir)
    try:
        assert engine.stats().max_num_blocks == LONGEST // 16 + 64
    finally:
        engine.close()


def test_the_engine_says_what_it_makes(engine_dir: Path, tmp_path: Path) -> None:
    info = EngineDirectory.open(engine_dir).info()
    assert (info.pooling, info.output_width, info.max_seq_len) == ("embeddings", 64, LONGEST)
    make_reranker(tmp_path, "xlm-r")
    info = EngineDirectory.open(built(tmp_path, tmp_path / "engine")).info()
    assert (info.pooling, info.output_width, info.scores_with_sigmoid) == ("scores", 1, True)


def test_builds_that_cannot_be_are_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="max_num_tokens is 32, but this network reads a whole text, of up to 64"):
        built(checkpoint, tmp_path / "engine", max_num_tokens=32)
    with pytest.raises(RecipeError) as caught:
        resolve_network(read_config(checkpoint), BuildOptions(target="cuda", given={"gpu": "sm_90"}))
    for name in ("op embed_position", "op embed_segment", "op pool", "bidirectional of attention"):
        assert f"the cuda target does not support {name}" in str(caught.value)


def test_configs_that_mean_something_else_are_refused_by_name(checkpoint: Path) -> None:
    config = read_config(checkpoint)
    wrong = {"position_embedding_type": "relative_key", "is_decoder": True, "hidden_act": "relu"}
    with pytest.raises(CheckpointError) as caught:
        resolve_network(config | wrong, BuildOptions())
    assert all(f"{name} {value!r} is not supported" in str(caught.value) for name, value in wrong.items())
    scorer = config | {"architectures": ["BertForSequenceClassification"]}
    with pytest.raises(CheckpointError, match="it has 3 labels; networks that score a pair of texts have one"):
        resolve_network(scorer | {"id2label": {"0": "a", "1": "b", "2": "c"}}, BuildOptions())
    other = {"id2label": {"0": "a"}, "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}
    with pytest.raises(CheckpointError, match="Tanh of scores is not supported; supported: Sigmoid, Identity"):
        resolve_network(scorer | other, BuildOptions())


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("network", POOLING)
def test_rows_of_texts_depend_on_nothing_but_the_text(
    network: str, form: tuple[str, str, str], engine_file: EngineFile, open_runner: OpenRunner
) -> None:
    """Neither on company, nor on threads, nor on where blocks lie; and they are the reference's."""
    path = engine_file(network, *form)
    texts = [(random_ids(83, length, seed=length), length // 3) for length in (1, 2, 9, 16, 31, 37)]
    alone = [texts_in_a_step(open_runner(path, num_blocks=64), [text])[0] for text in texts]
    for threads in (1, 2, 3):
        runner = open_runner(path, num_blocks=64, threads=threads)
        for order in ([0, 1, 2, 3, 4], [5, 3, 1], [4, 5, 0]):
            for index, found in zip(order, texts_in_a_step(runner, [texts[i] for i in order]), strict=True):
                np.testing.assert_array_equal(found, alone[index])
    dtype, quantization, cache_dtype = form
    options = replace(LIMITS, dtype=dtype, quantization=quantization, kv_cache_dtype=cache_dtype)
    reference = POOLING[network]().reference(options)
    wanted = reference.logits_of([Run(ids, second_segment=second) for ids, second in texts])
    error = max(np.abs(row - exact[0]).max() for row, exact in zip(alone, wanted, strict=True))
    assert error / max(np.abs(exact).max() for exact in wanted) < (1e-5 if form == ("float32", "", "auto") else 0.06)


def texts_in_a_step(runner: Any, texts: Sequence[tuple[Sequence[int], int]]) -> list[NDArray[np.float32]]:
    """Of each text the row; the last one has the first blocks."""
    free, chunks = list(range(64)), []
    for index, (ids, second) in enumerate(texts):
        table = [free.pop() for _ in range(-(-len(ids) // LIMITS.tokens_per_block))]
        chunks.append(Chunk(index, ids, 0, table, pooled=True, second_segment=second))
    found = runner.step(StepPlan(tuple(chunks))).logits
    return [found[index][0] for index in range(len(texts))]


def test_a_decoder_that_pools_has_adapters(tmp_path: Path, open_runner: OpenRunner) -> None:
    """In one step with one that has none."""
    base = odd_network()
    network = replace(base, program=without_head(base.program, Pooling("last", normalize=True)))
    arrays = network.arrays
    parts = random_parts({f"{i}.out": (arrays[f"{i}.out"].shape[0], arrays[f"{i}.out"].shape[1]) for i in range(3)})
    runner = open_runner(network.compile(tmp_path / "e.engine", LIMITS), threads=2)
    assert isinstance(runner, CpuRunner)
    runner.load_adapter(1, runner.packed(sealed(tmp_path / "adapter", parts)))
    ids = random_ids(83, 30)
    chunks = [Chunk(slot, ids, 0, [8 * slot + n for n in range(8)], pooled=True, adapter=slot) for slot in (0, 1)]
    found = runner.step(StepPlan(tuple(chunks))).logits
    for slot, adapter in ((0, ()), (1, parts)):
        wanted = network.reference(LIMITS, adapter).logits(ids)
        assert np.abs(found[slot] - wanted).max() < 1e-5
    assert float(found[0][0] @ found[1][0]) < 0.99
