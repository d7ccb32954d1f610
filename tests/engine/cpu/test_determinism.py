"""The law of `law.py`, per instruction set and number format, and what it means for single features."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.core import SamplingParams
from llmserve.engine.base import StepResult
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.scheduler.plan import Chunk, SampleRequest, StepPlan
from tests.checkpoints import make_checkpoint
from tests.engine.cpu.conftest import NETWORKS, EngineFile, OpenRunner
from tests.engine.cpu.law import FORMATS, any_of, law, run_randomly
from tests.engine.cpu.networks import LIMITS, Stepper, all_logits, random_ids
from tests.engine.cpu.other_process import ISAS

VARIANTS = [(network, form, isa) for network in NETWORKS for form in FORMATS for isa in ISAS]


@pytest.mark.parametrize(("network", "form", "isa"), VARIANTS)
def test_logits_do_not_depend_on_company_chunks_threads_blocks_or_tactics(
    network: str, form: tuple[str, str, str], isa: str, engine_file: EngineFile, open_runner: OpenRunner
) -> None:
    path = engine_file(network, *form)
    runners = [open_runner(path, isa=isa, threads=threads, num_blocks=90) for threads in (1, 2, 3)]
    law(open_runner(path, isa=isa, threads=1), any_of(runners, path))


class CarelessRunner:
    """What the law must find: a last bit that depends on how many sequences are in the step."""

    def __init__(self, runner: Stepper) -> None:
        self._runner = runner
        self.info = runner.info

    def step(self, plan: StepPlan) -> StepResult:
        result = self._runner.step(plan)
        if len(plan.chunks) > 1:
            result.logits[0][0, 0] = np.nextafter(result.logits[0][0, 0], np.float32(np.inf))
        return result


def test_the_law_finds_a_runner_that_breaks_it(engine_file: EngineFile, open_runner: OpenRunner) -> None:
    path = engine_file("rope", "float32", "")
    careless = CarelessRunner(open_runner(path, num_blocks=90))
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        law(open_runner(path), lambda rng: careless)


@pytest.mark.parametrize(("dtype", "quantization", "cache_dtype"), FORMATS)
def test_a_sequence_is_the_same_in_batches_of_2_to_64(
    dtype: str, quantization: str, cache_dtype: str, tmp_path: Path, open_runner: OpenRunner
) -> None:
    """One token each, so that the rows of a step go through every tile of the linear layers."""
    options = dataclasses.replace(
        LIMITS, dtype=dtype, quantization=quantization, kv_cache_dtype=cache_dtype, max_batch_size=64
    )
    path = NETWORKS["rope"]().compile(tmp_path / "wide.engine", options)
    runner = open_runner(path, num_blocks=64, threads=2)
    ids = random_ids(83, 64)
    chunks = [Chunk(i, [token], 0, [i], return_logits=True) for i, token in enumerate(ids)]
    alone = [runner.step(StepPlan((chunk,))).logits[0] for chunk in chunks]
    for size in range(2, 65):
        first = size * 7 % (65 - size)
        result = runner.step(StepPlan(tuple(chunks[first : first + size])))
        for position in range(size):
            np.testing.assert_array_equal(result.logits[position], alone[first + position])


@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
def test_threads_may_share_the_queries_of_a_key_head(cache_dtype: str, tmp_path: Path, open_runner: OpenRunner) -> None:
    """Two key heads for seven threads: 25 queries read each, in parts of 8 and 9. They have sinks, and a window."""
    checkpoint = make_checkpoint(tmp_path / "c", "gpt-oss", num_attention_heads=50, head_dim=8, sliding_window=5)
    build_engine(checkpoint, tmp_path / "e", BuildOptions(dtype="float16", kv_cache_dtype=cache_dtype, max_seq_len=64))
    path, ids = EngineDirectory.open(tmp_path / "e").engine_file, random_ids(320, 40)
    one, many = (open_runner(path, threads=threads, num_blocks=2) for threads in (1, 7))
    for begin, end in ((0, 20), *((i, i + 1) for i in range(20, 40))):
        step = StepPlan((Chunk(0, ids[begin:end], begin, [0, 1], return_logits=True),))
        np.testing.assert_array_equal(many.step(step).logits[0], one.step(step).logits[0])


@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("tokens_per_block", [1, 3, 16, 96])
def test_logits_do_not_depend_on_the_block_size(
    tokens_per_block: int, cache_dtype: str, tmp_path: Path, engine_file: EngineFile, open_runner: OpenRunner
) -> None:
    network = NETWORKS["rope"]()
    options = dataclasses.replace(
        LIMITS, dtype="float16", kv_cache_dtype=cache_dtype, tokens_per_block=tokens_per_block, max_num_tokens=70
    )
    other = open_runner(network.compile(tmp_path / "other.engine", options), num_blocks=96)
    ids = random_ids(83, 70)
    wanted = all_logits(open_runner(engine_file("rope", "float16", "", cache_dtype)), ids)
    np.testing.assert_array_equal(all_logits(other, ids), wanted)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("network", NETWORKS)
def test_attention_over_integers_keeps_the_law_over_many_chunks_of_positions(
    network: str, isa: str, tmp_path: Path, open_runner: OpenRunner
) -> None:
    """Chunks of positions begin at their multiples, whatever was computed together and however blocks cut them."""
    limits = dataclasses.replace(LIMITS, dtype="float16", quantization="int8", max_seq_len=600, max_num_tokens=600)
    prompts = [random_ids(83, length, length) for length in (600, 257, 31)]
    runners = []
    for tokens_per_block in (32, 64, 12):
        options = dataclasses.replace(limits, tokens_per_block=tokens_per_block)
        path = NETWORKS[network]().compile(tmp_path / f"{tokens_per_block}.engine", options)
        runners.append(open_runner(path, isa=isa, threads=2, num_blocks=100))
    wanted = [all_logits(runners[0], ids) for ids in prompts]
    for seed, runner in enumerate(runners):
        for found, expected in zip(run_randomly(runner, prompts, random.Random(seed)), wanted, strict=True):
            np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_a_recomputed_cache_changes_nothing(engine_file: EngineFile, open_runner: OpenRunner) -> None:
    """Preemption: decode half, lose the blocks, compute the whole again in other blocks, go on."""
    runner = open_runner(engine_file("alibi", "bfloat16", ""))
    ids = random_ids(83, 40)
    wanted = all_logits(runner, ids)
    runner.step(StepPlan((Chunk(1, ids[:25], 0, list(range(20, 30))),)))
    runner.step(StepPlan((Chunk(1, ids[:33], 0, list(range(40, 50))),)))
    rest = runner.step(StepPlan((Chunk(1, ids[33:], 33, list(range(40, 50)), return_logits=True),))).logits[0]
    np.testing.assert_array_equal(rest, wanted[33:])


def test_a_shared_prefix_changes_nothing(engine_file: EngineFile, open_runner: OpenRunner) -> None:
    """Two sequences that read the same blocks for their common beginning."""
    runner = open_runner(engine_file("rope", "float16", ""), threads=2)
    common, tails = random_ids(83, 16), [random_ids(83, 9, seed) for seed in (1, 2)]
    wanted = [all_logits(runner, common + tail)[16:] for tail in tails]
    runner.step(StepPlan((Chunk(0, common, 0, [9, 8, 7, 6]),)))
    tables = ([9, 8, 7, 6, 20, 21, 22], [9, 8, 7, 6, 30, 31, 32])
    result = runner.step(StepPlan(tuple(Chunk(i, tails[i], 16, tables[i], return_logits=True) for i in range(2))))
    for i in range(2):
        np.testing.assert_array_equal(result.logits[i], wanted[i])


def test_tokens_and_log_probs_do_not_depend_on_company(engine_file: EngineFile, open_runner: OpenRunner) -> None:
    path = engine_file("rope", "float16", "int8")
    params = SamplingParams(temperature=0.9, top_k=30, top_p=0.9, seed=11)
    prompts = [random_ids(83, 3 + 5 * i, i) for i in range(6)]
    chunks = [
        Chunk(i, ids, 0, list(range(10 * i, 10 * i + 10)), SampleRequest(params, i, len(ids), log_prob=True))
        for i, ids in enumerate(prompts)
    ]
    alone = open_runner(path, threads=1)
    single = [alone.step(StepPlan((chunk,))) for chunk in chunks]
    together = open_runner(path, threads=3).step(StepPlan(tuple(chunks)))
    assert together.tokens == [result.tokens[0] for result in single]
    assert together.log_probs == [result.log_probs[0] for result in single]
    assert len(set(together.tokens)) > 1
