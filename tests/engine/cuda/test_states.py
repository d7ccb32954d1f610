"""Networks with states on interpreted CUDA engines: logits, and the same bits wherever a sequence was cut."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.quantization import quantized_params
from llmserve.builder.reference import ReferenceModel
from llmserve.builder.targets.cuda.target import CudaTarget
from llmserve.core import GenerateRequest, SamplingParams
from llmserve.engine.base import Engine
from llmserve.engine.cuda.runner import CudaRunner
from llmserve.engine.cuda.runtime import CudaRuntime
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.registry import runtime_for
from llmserve.engine.settings import EngineSettings
from llmserve.models.graph import PLAIN_ACTIVATIONS, CacheShape, Graph
from llmserve.scheduler.plan import Chunk, StepPlan
from tests.checkpoints import make_checkpoint
from tests.engine.cpu.law import run_randomly
from tests.engine.cpu.networks import LIMITS, Network, all_logits, random_ids
from tests.engine.cuda.engines import WIDE_TILES, compile_engine, open_runner
from tests.engine.cuda.fake_device import FakeCompiler, FakeDevice, run_kernel
from tests.engine.cuda.hybrids import CONFIGS, hybrid
from tests.engine.cuda.test_engine import OPTIONS, TOLERANCE, assert_same_bits
from tests.oracle import relative_error

LAWFUL = ["lfm2", "qwen3.5", "granite4-h"]
NUM_TOKENS = 11
LIMITS_OF_TOKENS = {"max_seq_len": 32, "max_num_tokens": 16, "max_batch_size": 4, "tokens_per_block": 4}


def open_hybrid(network: str, folder: Path, dtype: str, quantization: str = "") -> CudaRunner:
    options = dataclasses.replace(OPTIONS, dtype=dtype, quantization=quantization)
    return open_runner(compile_engine(hybrid(network), folder / "e.engine", options, tiles=WIDE_TILES))


@pytest.mark.parametrize(
    "case",
    [
        *((network, "float32") for network in CONFIGS),
        ("lfm2", "float16"),
        ("bamba", "bfloat16"),
        ("qwen3.5", "float32", "int8"),
        ("granite4-h", "float32", "int8"),
    ],
    ids="-".join,
)
def test_logits_are_those_of_the_reference(case: tuple[str, ...], tmp_path: Path) -> None:
    network, dtype, *quantization = case
    runner, made = open_hybrid(network, tmp_path, *case[1:]), hybrid(network)
    ids = random_ids(runner.info.vocab_size, NUM_TOKENS)
    options = dataclasses.replace(OPTIONS, dtype=dtype, quantization="".join(quantization))
    quantized = quantized_params(made.program, made.params, options)
    wanted = ReferenceModel(made.program, partial(made.load, dtype=dtype), quantized=quantized).logits(ids)
    assert relative_error(all_logits(runner, ids), wanted) < TOLERANCE[dtype]


def test_gates_of_one_number_and_activations_without_a_gate(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    shapes = {"embed": (32, 20), "gate": (1, 20), "head": (32, 20)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    g = Graph(CacheShape(1, 1, 2), 32)
    x = g.embed("embed", 20)
    y = g.sigmoid_gate(x, g.linear(x, "gate", 1))
    for activation in PLAIN_ACTIVATIONS:
        y = g.add(y, g.activation(x, activation=activation))
    g.logits(g.select_rows(y), "head")
    network = Network(g.program(), arrays)
    runner = open_runner(compile_engine(network, tmp_path / "e.engine", OPTIONS, tiles=WIDE_TILES))
    wanted = network.reference(LIMITS).logits([3, 5])
    assert relative_error(all_logits(runner, [3, 5]), wanted) < TOLERANCE["float32"]


def test_small_steps_of_a_scan_keep_their_last_bits() -> None:
    """Of one token whose numbers are all one, what is added to a state is its step: log(1 + exp(x))."""
    steps = np.linspace(-40, 40, 128, dtype=np.float32)
    count, nothing = len(steps), np.zeros_like(steps)
    arrays = {
        "xbc": np.ones(count + 2, np.float32), "steps": steps, "decay": nothing, "bias": nothing, "skip": nothing,
        "states": np.empty_like(steps), "chunks": np.array([0, 1, -1, 0, 0, 0], np.int32), "y": np.empty_like(steps),
    }  # fmt: skip
    sizes = {"NUM_HEADS": count, "NUM_GROUPS": 1, "STATE_SIZE": 1, "HEAD_DIM": 1, "STATE_STRIDE": count}
    strides = {"X_STRIDE": count + 2, "STEPS_STRIDE": count, "Y_STRIDE": count}
    kernel = {
        "function": "states.selective_scan",
        "types": [(name, "*i32" if name == "chunks" else "*fp32") for name in arrays],
        "constants": [*{**sizes, **strides, "TILE_STATE_ROWS": 1, "TILE_COLUMNS": 1}.items()],
    }
    run_kernel(kernel, (1, count, 1), [array.ctypes.data for array in arrays.values()])
    np.testing.assert_allclose(arrays["y"], np.logaddexp(0.0, steps.astype(np.float64)), rtol=3e-7)
    np.testing.assert_array_equal(arrays["y"], arrays["states"])


@pytest.fixture(scope="module", params=LAWFUL)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CudaRunner]:
    opened = open_hybrid(request.param, tmp_path_factory.mktemp("states"), "float16")
    yield opened
    opened.close()


def test_logits_do_not_depend_on_the_cuts(runner: CudaRunner) -> None:
    """In pieces, each of which leaves its state in another slot, and one between; beside another sequence."""
    prompts = [random_ids(83, length, length) for length in (NUM_TOKENS, 3)]
    alone = [all_logits(runner, ids) for ids in prompts]
    for found, wanted in zip(run_randomly(runner, prompts, random.Random(4)), alone, strict=True):
        assert_same_bits(found, wanted)


def test_a_state_that_was_kept_is_gone_on_from(runner: CudaRunner) -> None:
    """By several sequences, some of which write the slot that they read; in one piece, and token by token."""
    ids = random_ids(83, NUM_TOKENS, 7)
    blocks = list(range(3))
    first = Chunk(0, ids, 0, blocks, return_logits=True, states=(0, 1), kept_state=(2, 8))
    whole = runner.step(StepPlan((first,))).logits[0]
    other = Chunk(1, ids[8:], 8, [*blocks[:2], 3], return_logits=True, states=(2, 3), kept_state=(4, 1))
    again = Chunk(2, ids[9:], 9, [*blocks[:2], 3], return_logits=True, states=(4, 4))
    assert_same_bits(runner.step(StepPlan((other,))).logits[0], whole[8:])
    assert_same_bits(runner.step(StepPlan((again,))).logits[0], whole[9:])
    rows = []
    for place in range(8, NUM_TOKENS):
        states = (2, 5) if place == 8 else (5, 5)
        chunk = Chunk(3, ids[place : place + 1], place, blocks, return_logits=True, states=states)
        rows.append(runner.step(StepPlan((chunk,))).logits[0])
    assert_same_bits(np.concatenate(rows), whole[8:])


async def answers(engine: Engine) -> list[list[int]]:
    """Of a prompt, then of two beside each other that begin like it."""

    async def answer(prompt: list[int]) -> list[int]:
        request = GenerateRequest("r", tuple(prompt), SamplingParams(max_tokens=3))
        return [token async for event in engine.submit(request) for token in event.token_ids]

    ids = random_ids(83, 10)
    return [await answer(ids), *await asyncio.gather(answer(ids), answer([*ids[:9], 3, 4]))]


async def test_an_engine_answers_as_the_cpus_and_reuses_prefixes(tmp_path: Path) -> None:
    """Steps begin before the last one's tokens are known, and prompts from checkpoints of states."""
    limits: dict[str, Any] = {"dtype": "float32", **LIMITS_OF_TOKENS}
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "lfm2", with_tokenizer=False, **CONFIGS["lfm2"])
    build_engine(checkpoint, tmp_path / "cpu", BuildOptions(**limits))
    options = BuildOptions(target="cuda", given={"gpu": "sm_90"}, **limits)
    build_engine(checkpoint, tmp_path / "cuda", options, target=CudaTarget(FakeCompiler(), WIDE_TILES))
    device = FakeDevice()
    runtime, directory = CudaRuntime(lambda ordinal: device), EngineDirectory.open(tmp_path / "cuda")
    settings = EngineSettings(threads=1)
    with (
        closing(runtime_for("cpu").open(EngineDirectory.open(tmp_path / "cpu"), settings)) as cpu,
        closing(runtime.open(directory, settings)) as cuda,
    ):
        assert await answers(cuda) == await answers(cpu)
        stats = cuda.stats()
        assert stats.reused_blocks >= 4
        assert stats.free_num_states == stats.max_num_states > 4
        assert stats.gpu_mem_usage == device.used_bytes - 1, "all but the byte of an empty array"
        assert stats.promised_bytes == 0, "nothing of the host's memory"
