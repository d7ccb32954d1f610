"""The compiled engine against transformers: logits, and 64 greedy steps through in-flight batching.

Baichuan's oracle is our torch implementation, which tests/models compares with transformers' Llama in turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.core import GenerateRequest, PromptScores, SamplingParams
from llmserve.engine.cpu.runner import CpuRunner
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.selftest import prompt_logits
from llmserve.engine.open import open_engine
from llmserve.evaluation.judging.parity import ROUNDING_MARGIN
from tests.checkpoints import KINDS, MIXTURES, WITH_STATES, make_checkpoint
from tests.e2e.conftest import CHECKPOINT
from tests.oracle import load_oracle, oracle_logits, relative_error

NUM_STEPS = 64
# Of ops that other kinds have with the same attributes: rounded and quantized, they say nothing new of the engine.
LIKE_OTHERS = {
    "arcee", "cohere2", "cwm", "dots1-moe", "ernie4.5", "exaone-moe", "exaone4", "flex-olmo-moe", "gemma", "glm",
    "granite-shared-moe", "granite4", "granite4-h", "helium", "hyperclovax", "internlm3", "jais2", "olmo2", "olmo3",
    "seed-oss", "smollm3", "solar-open-moe", "vaultgemma",
}  # fmt: skip
PROMPTS = ((5, 17, 200, 31, 9), tuple(range(3, 60)), (250,))


class Oracle(NamedTuple):
    checkpoint: Path
    model: Any
    logits: tuple[NDArray[np.float32], ...]  # of PROMPTS


OracleOf: TypeAlias = Callable[..., Oracle]


@pytest.fixture(scope="module")
def oracle_of(tmp_path_factory: pytest.TempPathFactory) -> OracleOf:
    """(kind, dtype): several engines are compared with one oracle."""
    folder = tmp_path_factory.mktemp("checkpoints")

    @cache
    def made(kind: str, dtype: str = "float32") -> Oracle:
        checkpoint = make_checkpoint(folder / f"{kind}-{dtype}", kind, dtype=dtype)
        model = load_oracle(checkpoint)
        return Oracle(checkpoint, model, tuple(oracle_logits(model, prompt) for prompt in PROMPTS))

    return made


def engine_of(checkpoint: Path, path: Path, dtype: str, quantization: str = "") -> Path:
    options = BuildOptions(dtype=dtype, quantization=quantization, max_num_tokens=32, tokens_per_block=16)
    build_engine(checkpoint, path, options)
    return path


def torch_log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    import torch

    found: NDArray[np.float64] = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1).numpy()
    return found


def generated(engine_dir: Path, prompts: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    """Greedy answers of all prompts, batched in flight."""

    async def answer(engine: Any, index: int) -> list[int]:
        sampling = SamplingParams(max_tokens=NUM_STEPS, temperature=0.0)
        events = engine.submit(GenerateRequest(str(index), prompts[index], sampling))
        return [token async for event in events for token in event.token_ids]

    async def answers() -> list[list[int]]:
        engine = open_engine(engine_dir)
        try:
            return await asyncio.gather(*(answer(engine, index) for index in range(len(prompts))))
        finally:
            engine.close()

    return asyncio.run(answers())


def check_greedy(oracle: Any, prompt: tuple[int, ...], tokens: list[int], margin: float) -> None:
    """Every token is the oracle's argmax of what precedes it, or within `margin` nats of it at the first that is not.

    Logits differ by as much as log-probs do, so their difference is in nats.
    """
    assert len(tokens) == NUM_STEPS
    logits = oracle_logits(oracle, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    for step, token in enumerate(tokens):
        behind = float(logits[step].max() - logits[step, token])
        if behind > 0:
            assert behind < margin, f"step {step}: token {token} is {behind:.3f} nats behind"
            return


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_float32_logits_and_greedy_tokens(kind: str, oracle_of: OracleOf, tmp_path: Path) -> None:
    oracle = oracle_of(kind)
    engine = engine_of(oracle.checkpoint, tmp_path / "engine", "float32")
    runner = CpuRunner.open(EngineDirectory.open(engine).engine_file, num_blocks=16)
    for prompt, wanted in zip(PROMPTS, oracle.logits, strict=True):
        assert relative_error(prompt_logits(runner, list(prompt), sequence_id=0), wanted) < 1e-4
    runner.close()
    for prompt, tokens in zip(PROMPTS, generated(engine, PROMPTS), strict=True):
        check_greedy(oracle.model, prompt, tokens, margin=0.0)


def test_a_scaling_that_was_added_to_what_transformers_saved(tmp_path: Path) -> None:
    """With `rope_parameters` and `rope_scaling`, transformers computes by the latter."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    saved = {"rope_type": "default", "rope_theta": 1000000.0}
    checkpoint = make_checkpoint(tmp_path / "both", "qwen3", rope_parameters=saved, rope_scaling=scaling)
    engine = engine_of(checkpoint, tmp_path / "engine", "float32")
    runner = CpuRunner.open(EngineDirectory.open(engine).engine_file, num_blocks=16)
    wanted = oracle_logits(load_oracle(checkpoint), PROMPTS[1])
    assert relative_error(prompt_logits(runner, list(PROMPTS[1]), sequence_id=0), wanted) < 1e-4
    runner.close()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(MIXTURES) - LIKE_OTHERS))
def test_rounded_engines_leave_the_oracle_only_at_near_ties(kind: str, dtype: str, tmp_path: Path) -> None:
    """The oracle computes in float32 on the same rounded weights: what differs is the engine's own rounding.

    It changes the choice of experts, where two are nearly equal: mixtures are compared with the reference, whose cache
    is rounded, too (tests/engine/cpu/test_logits.py, tests/builder/test_cpu_engine.py).
    """
    checkpoint = make_checkpoint(tmp_path / "checkpoint", kind, dtype=dtype)
    engine = engine_of(checkpoint, tmp_path / "engine", dtype)
    oracle = load_oracle(checkpoint)
    for prompt, tokens in zip(PROMPTS, generated(engine, PROMPTS), strict=True):
        check_greedy(oracle, prompt, tokens, margin=ROUNDING_MARGIN)


def test_log_probs_of_prompts_are_those_of_transformers(tmp_path: Path) -> None:
    """With chunks shorter than the prompt."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "llama")
    oracle = load_oracle(checkpoint)
    engine = open_engine(engine_of(checkpoint, tmp_path / "engine", "float32"))

    async def scores(prompt: tuple[int, ...]) -> PromptScores:
        request = GenerateRequest(
            "r", prompt, SamplingParams(max_tokens=1), return_prompt_log_probs=True, num_top_log_probs=20
        )
        [event] = [event async for event in engine.submit(request)]
        assert event.prompt is not None
        return event.prompt

    for prompt in PROMPTS:
        found = asyncio.run(scores(prompt))
        wanted = torch_log_softmax(oracle_logits(oracle, prompt))[:-1]
        np.testing.assert_allclose(found.log_probs, wanted[range(len(prompt) - 1), prompt[1:]], atol=1e-4)
        for top, row in zip(found.top, wanted, strict=True):
            np.testing.assert_allclose(top.log_probs, row[list(top.ids)], atol=1e-4)
            np.testing.assert_allclose(top.log_probs, np.sort(row)[::-1][:20], atol=1e-4)
    engine.close()


@pytest.mark.parametrize(("quantization", "bound"), [("int8", 0.08), ("int4", 0.6)])
@pytest.mark.parametrize("kind", sorted(set(KINDS) - LIKE_OTHERS))
def test_quantized_logits_are_those_of_the_same_network(
    kind: str, quantization: str, bound: float, oracle_of: OracleOf, tmp_path: Path
) -> None:
    """Root mean square error relative to the oracle's logits, whose weights are not rounded.

    These networks are as narrow as a group of int4, so its errors are large; those of another network are above one.
    So are those of a position whose choice of experts rounding changes. Heads of a delta net are divided by their
    length, however small it is, and with it what rounding has changed. Scores of Gemma 4 are not divided by the root
    of the head size, which makes differences larger.
    """
    has_delta_nets = kind in WITH_STATES and not kind.startswith("lfm2")
    bound = max(bound, 0.25) if kind in MIXTURES or has_delta_nets or kind == "gemma4" else bound
    bound = max(bound, 0.9) if has_delta_nets and quantization == "int4" else bound
    oracle = oracle_of(kind)
    engine = engine_of(oracle.checkpoint, tmp_path / "engine", "float32", quantization)
    runner = CpuRunner.open(EngineDirectory.open(engine).engine_file, num_blocks=16)
    for prompt, wanted in zip(PROMPTS, oracle.logits, strict=True):
        error = prompt_logits(runner, list(prompt), sequence_id=0) - wanted
        assert np.sqrt(np.mean(error**2) / np.mean(wanted**2)) < bound
    runner.close()


@pytest.mark.parametrize(("dtype", "margin"), [("float32", 0.0), ("float16", ROUNDING_MARGIN)])
def test_the_demo_checkpoint(dtype: str, margin: float, tmp_path: Path) -> None:
    engine = engine_of(CHECKPOINT, tmp_path / "engine", dtype)
    oracle = load_oracle(CHECKPOINT)
    prompts = tuple((195, *np.random.default_rng(seed).integers(200, 5000, 40).tolist(), 196) for seed in range(4))
    for prompt, tokens in zip(prompts, generated(engine, prompts), strict=True):
        check_greedy(oracle, prompt, tokens, margin=margin)


def test_the_comparison_notices_a_wrong_token(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "llama")
    oracle = load_oracle(checkpoint)
    [tokens] = generated(engine_of(checkpoint, tmp_path / "engine", "float32"), PROMPTS[:1])
    tokens[30] = (tokens[30] + 1) % 300
    with pytest.raises(AssertionError, match="step 30"):
        check_greedy(oracle, PROMPTS[0], tokens, margin=0.0)
