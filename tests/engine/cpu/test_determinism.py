"""The law of the engine: logits are the same to the bit, alone or in a batch, in one chunk or many, with any number of
threads, wherever the cache blocks lie, with any tactic. Per instruction set and number format."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmserve.core import SamplingParams
from llmserve.engine.base import RunnerInfo, StepResult
from llmserve.engine.cpu.layout import read_linear_layers
from llmserve.engine.cpu.library import load_library
from llmserve.engine.cpu.runner import CpuRunner, available_isas
from llmserve.engine.cpu.tactics import ROW_BUCKETS
from llmserve.scheduler.plan import Chunk, SampleRequest, StepPlan
from tests.engine.cpu.conftest import NETWORKS, EngineFile, OpenRunner
from tests.engine.cpu.networks import LIMITS, all_logits, random_ids

FORMATS = (  # (dtype, quantization, dtype of the KV cache)
    ("float32", "", "auto"),
    ("float16", "", "auto"),
    ("bfloat16", "", "auto"),
    ("float16", "int8", "auto"),
    ("bfloat16", "int4", "int8"),
    ("float32", "", "int8"),
)
VARIANTS = [(network, form, isa) for network in NETWORKS for form in FORMATS for isa in available_isas()]


class Stepper(Protocol):
    """What `CpuRunner` and a wrapper around it have in common."""

    @property
    def info(self) -> RunnerInfo: ...

    def step(self, plan: StepPlan) -> StepResult: ...


@dataclasses.dataclass
class Sequence:
    ids: list[int]
    blocks: list[int]
    logits: list[NDArray[np.float32]] = dataclasses.field(default_factory=list)  # one array per chunk

    @property
    def num_computed(self) -> int:
        return sum(map(len, self.logits))


def random_steps(sequences: list[Sequence], rng: random.Random, budget: int) -> Iterator[list[tuple[int, Chunk]]]:
    """Steps of (sequence index, chunk) until every token is computed: who takes part, and how far, is chance."""
    while waiting := [i for i, s in enumerate(sequences) if s.num_computed < len(s.ids)]:
        step, left = [], budget
        for i in rng.sample(waiting, rng.randint(1, len(waiting))):
            s = sequences[i]
            count = min(left, rng.choice([1, 1, 2, 3, 5, 8, 13, 40]), len(s.ids) - s.num_computed)
            if count:
                ids = s.ids[s.num_computed : s.num_computed + count]
                step.append((i, Chunk(i, ids, s.num_computed, s.blocks, return_logits=True)))
                left -= count
        yield step


def run_randomly(runner: Stepper, prompts: list[list[int]], rng: random.Random) -> list[NDArray[np.float32]]:
    """Logits of every prompt, computed together in random steps, over blocks strewn about the pool."""
    pool = list(range(runner.info.num_blocks))
    rng.shuffle(pool)
    sequences = []
    for ids in prompts:
        needed = -(-len(ids) // runner.info.block_size)
        sequences.append(Sequence(ids, pool[:needed]))
        del pool[:needed]
    for step in random_steps(sequences, rng, runner.info.max_num_tokens):
        result = runner.step(StepPlan(tuple(chunk for _, chunk in step)))
        for position, (i, _) in enumerate(step):
            sequences[i].logits.append(result.logits[position])
    return [np.concatenate(s.logits) for s in sequences]


def random_tactics(path: Path, isa: str, rng: random.Random) -> bytes:
    """Any tactic for any linear layer and number of rows."""
    num_ops, layers = read_linear_layers(path)
    table = bytearray(num_ops * len(ROW_BUCKETS))
    for index, shape in layers.items():
        names, _ = load_library().tactics(isa, shape.weight_type)
        for bucket in range(len(ROW_BUCKETS)):
            table[index * len(ROW_BUCKETS) + bucket] = rng.randrange(len(names))
    return bytes(table)


def law(alone: CpuRunner, choose: Callable[[random.Random], Stepper]) -> None:
    """The logits of every prompt are those that it has alone, on whatever runner is chosen and in any random steps.

    Raises AssertionError when hypothesis finds a counterexample.
    """

    @settings(max_examples=8, deadline=None, derandomize=True, report_multiple_bugs=False)
    @given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4), seed=st.integers(0, 2**32))
    def check(lengths: list[int], seed: int) -> None:
        rng = random.Random(seed)
        prompts = [random_ids(83, length, seed % 1000 + i) for i, length in enumerate(lengths)]
        wanted = [all_logits(alone, ids) for ids in prompts]
        for found, expected in zip(run_randomly(choose(rng), prompts, rng), wanted, strict=True):
            np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))

    check()


@pytest.mark.parametrize(("network", "form", "isa"), VARIANTS)
def test_logits_do_not_depend_on_company_chunks_threads_blocks_or_tactics(
    network: str, form: tuple[str, str, str], isa: str, engine_file: EngineFile, open_runner: OpenRunner
) -> None:
    path = engine_file(network, *form)
    runners = [open_runner(path, isa=isa, threads=threads, num_blocks=90) for threads in (1, 2, 3)]

    def any_runner(rng: random.Random) -> CpuRunner:
        runner = rng.choice(runners)
        runner.set_tactics(random_tactics(path, isa, rng))
        return runner

    law(open_runner(path, isa=isa, threads=1), any_runner)


class CarelessRunner:
    """What the law must find: a last bit that depends on how many sequences are in the step."""

    def __init__(self, runner: CpuRunner) -> None:
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
