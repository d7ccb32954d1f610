"""The law of the engine, as a property: logits are the same to the bit, alone or in a batch, in one chunk or many, with
any number of threads, wherever the cache blocks lie, with any tactic."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmserve.engine.cpu.layout import read_linear_layers
from llmserve.engine.cpu.runner import CpuRunner
from llmserve.engine.cpu.tactics import ROW_BUCKETS
from llmserve.engine.native.library import load_library
from llmserve.scheduler.plan import Chunk, StepPlan
from tests.engine.cpu.networks import LIMITS, Stepper, all_logits, random_ids
from tests.engine.cpu.other_process import OtherRunner

FORMATS = (  # (dtype, quantization, dtype of the KV cache)
    ("float32", "", "auto"),
    ("float16", "", "auto"),
    ("bfloat16", "", "auto"),
    ("float16", "int8", "auto"),
    ("bfloat16", "int4", "int8"),
    ("float32", "", "int8"),
)


AnyRunner = CpuRunner | OtherRunner


@dataclasses.dataclass
class Sequence:
    ids: list[int]
    blocks: list[int]
    state: int = 0
    adapter: int = 0
    logits: list[NDArray[np.float32]] = dataclasses.field(default_factory=list)  # one array per chunk

    @property
    def num_computed(self) -> int:
        return sum(map(len, self.logits))


def random_steps(sequences: list[Sequence], rng: random.Random, budget: int) -> Iterator[list[tuple[int, Chunk]]]:
    """Steps of (sequence index, chunk) until every token is computed: who takes part, and how far, is chance.

    A sequence has its state in another slot after each step.
    """
    free_states = list(range(len(sequences), 2 * len(sequences)))
    spare = range(2 * len(sequences), LIMITS.max_batch_size)
    while waiting := [i for i, s in enumerate(sequences) if s.num_computed < len(s.ids)]:
        left, left_behind = budget, list[int]()
        step: list[tuple[int, Chunk]] = []
        for i in rng.sample(waiting, rng.randint(1, len(waiting))):
            s = sequences[i]
            count = min(left, rng.choice([1, 1, 2, 3, 5, 8, 13, 40]), len(s.ids) - s.num_computed)
            if count:
                ids = s.ids[s.num_computed : s.num_computed + count]
                before, s.state = s.state, free_states.pop(rng.randrange(len(free_states)))
                kept = (spare[len(step)], rng.randrange(count)) if len(step) < len(spare) else (0, 0)
                if s.num_computed and rng.random() < 0.5:  # in the slot that is read, as before drafts
                    kept = (before, rng.randrange(count))
                chunk = Chunk(
                    i, ids, s.num_computed, s.blocks, return_logits=True, states=(before, s.state), kept_state=kept,
                    adapter=s.adapter,
                )  # fmt: skip
                step.append((i, chunk))
                left_behind.append(before)
                left -= count
        yield step
        free_states += left_behind


def run_randomly(
    runner: Stepper, prompts: list[list[int]], rng: random.Random, adapters: Iterable[int] = repeat(0)
) -> list[NDArray[np.float32]]:
    """Logits of every prompt, computed together in random steps, over blocks strewn about the pool."""
    pool = list(range(runner.info.num_blocks))
    rng.shuffle(pool)
    sequences: list[Sequence] = []
    for ids, adapter in zip(prompts, adapters, strict=False):
        needed = -(-len(ids) // runner.info.block_size)
        sequences.append(Sequence(ids, pool[:needed], len(sequences), adapter))
        del pool[:needed]
    for step in random_steps(sequences, rng, runner.info.max_num_tokens):
        result = runner.step(StepPlan(tuple(chunk for _, chunk in step)))
        for position, (i, _) in enumerate(step):
            sequences[i].logits.append(result.logits[position])
    return [np.concatenate(s.logits) for s in sequences]


def random_tactics(path: Path, runner: AnyRunner, rng: random.Random) -> bytes:
    """Any tactic for any linear layer and number of rows."""
    num_ops, layers = read_linear_layers(path)
    table = bytearray(num_ops * len(ROW_BUCKETS))
    for index, shape in layers.items():
        for bucket, rows in enumerate(ROW_BUCKETS):
            num_tactics = len(tactic_names(runner, shape.weight_type, rows))
            table[index * len(ROW_BUCKETS) + bucket] = rng.randrange(num_tactics)
    return bytes(table)


def tactic_names(runner: AnyRunner, weight_type: int, rows: int) -> list[str]:
    if isinstance(runner, OtherRunner):
        return runner.tactics(weight_type, rows)
    return load_library().tactics(runner.isa, weight_type, rows)[0]


def law(alone: Stepper, choose: Callable[[random.Random], Stepper]) -> None:
    """The logits of every prompt are those that it has alone, on whatever runner is chosen and in any random steps.

    Raises AssertionError when hypothesis finds a counterexample.
    """

    @settings(max_examples=8, derandomize=True, report_multiple_bugs=False)
    @given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4), seed=st.integers(0, 2**32))
    def check(lengths: list[int], seed: int) -> None:
        rng = random.Random(seed)
        prompts = [random_ids(83, length, seed % 1000 + i) for i, length in enumerate(lengths)]
        wanted = [all_logits(alone, ids) for ids in prompts]
        for found, expected in zip(run_randomly(choose(rng), prompts, rng), wanted, strict=True):
            np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))

    check()


def any_of(runners: list[AnyRunner], path: Path) -> Callable[[random.Random], Stepper]:
    """For `law`: one of them, with any tactics."""

    def choose(rng: random.Random) -> Stepper:
        runner = rng.choice(runners)
        runner.set_tactics(random_tactics(path, runner, rng))
        return runner

    return choose
