"""LoRA adapters in the engine: what they compute, and that nobody's bits depend on whom a step has beside it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.engine.adapters.sealed import AdapterPart, PartShape
from llmserve.engine.cpu.runner import CpuRunner, available_isas
from llmserve.errors import EngineFileError, InternalError, InvalidArgument
from llmserve.models.graph import OpKind
from llmserve.scheduler.plan import Chunk, StepPlan
from tests.engine.cpu.conftest import NETWORKS, EngineFile
from tests.engine.cpu.law import FORMATS, random_tactics, run_randomly
from tests.engine.cpu.networks import LIMITS, all_logits, prefill, random_ids
from tests.engine.cpu.test_logits import error_of
from tests.oracle import relative_error
from tests.sealed_adapters import random_parts, sealed

CUTS = {f"{layer}.qkv": ((0, 60), (60, 80), (80, 100)) for layer in (0, 2)}
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


def parts_of(network: str, dtype: str, seed: int) -> list[AdapterPart]:
    """For every linear layer but the head; queries, keys and values have parts of their own in two layers."""
    ops = NETWORKS[network]().program.ops
    arrays = NETWORKS[network]().arrays
    shapes = {op.weights[0]: arrays[op.weights[0]].shape for op in ops if op.kind is OpKind.LINEAR}
    matrices = {name: (shape[0], shape[1]) for name, shape in shapes.items() if not name.endswith("router")}
    return random_parts(matrices, dtype=dtype, seed=seed, cuts=CUTS)


@pytest.fixture
def opened(request: pytest.FixtureRequest) -> Iterator[list[CpuRunner]]:
    """Runners that are closed when the test ends."""
    found: list[CpuRunner] = []
    yield found
    for runner in found:
        runner.close()


def put(runner: CpuRunner, path: Path, adapters: Sequence[Sequence[AdapterPart]]) -> None:
    """Into the slots from 1 on."""
    for slot, parts in enumerate(adapters, 1):
        runner.load_adapter(slot, runner.packed(sealed(path / f"{id(runner)}-{slot}", parts)))


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize(("dtype", "quantization", "cache_dtype"), FORMATS)
@pytest.mark.parametrize("network", ["rope", "peculiar", "plain"])
def test_the_engine_computes_what_the_reference_computes(
    network: str,
    dtype: str,
    quantization: str,
    cache_dtype: str,
    isa: str,
    engine_file: EngineFile,
    opened: list[CpuRunner],
    tmp_path: Path,
) -> None:
    path = engine_file(network, dtype, quantization, cache_dtype)
    runner = CpuRunner.open(path, num_blocks=64, threads=2, isa=isa)
    opened.append(runner)
    parts, ids = parts_of(network, dtype, 1), random_ids(83, 50)
    put(runner, tmp_path, [parts])
    options = dataclasses.replace(LIMITS, dtype=dtype, quantization=quantization, kv_cache_dtype=cache_dtype)
    plain, wanted = (NETWORKS[network]().reference(options, adapter).logits(ids) for adapter in ((), parts))
    chunk = dataclasses.replace(prefill(runner, ids), adapter=1)
    found = runner.step(StepPlan((chunk,))).logits[0]
    bound = 6e-2 if quantization or cache_dtype == "int8" else TOLERANCE[dtype]
    assert error_of(network, found, wanted) < bound
    assert relative_error(plain, wanted) > 0.1, "the adapter should be visible"
    assert error_of(network, all_logits(runner, ids), plain) < bound


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize(("dtype", "quantization", "cache_dtype"), FORMATS)
@pytest.mark.parametrize("network", ["rope", "experts"])
def test_logits_do_not_depend_on_company_chunks_threads_blocks_or_tactics(
    network: str,
    dtype: str,
    quantization: str,
    cache_dtype: str,
    isa: str,
    engine_file: EngineFile,
    opened: list[CpuRunner],
    tmp_path: Path,
) -> None:
    path = engine_file(network, dtype, quantization, cache_dtype)
    opened += [CpuRunner.open(path, num_blocks=90, threads=threads, isa=isa) for threads in (1, 2, 3)]
    for runner in opened:
        put(runner, tmp_path, [parts_of(network, dtype, seed) for seed in (1, 2, 3)])

    @settings(max_examples=5, derandomize=True, report_multiple_bugs=False, deadline=None)
    @given(who=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3)), min_size=1, max_size=4), seed=st.integers(0))
    def check(who: list[tuple[int, int]], seed: int) -> None:
        rng = random.Random(seed)
        prompts = [random_ids(83, length, seed % 1000 + i) for i, (length, _) in enumerate(who)]
        adapters = [adapter for _, adapter in who]
        alone = [
            opened[0].step(StepPlan((dataclasses.replace(prefill(opened[0], ids), adapter=adapter),))).logits[0]
            for ids, adapter in zip(prompts, adapters, strict=True)
        ]
        runner = rng.choice(opened)
        runner.set_tactics(random_tactics(path, runner, rng))
        for found, expected in zip(run_randomly(runner, prompts, rng, adapters), alone, strict=True):
            np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))

    check()


@pytest.mark.parametrize(("dtype", "quantization", "cache_dtype"), FORMATS)
def test_a_sequence_is_the_same_in_batches_of_2_to_64(
    dtype: str, quantization: str, cache_dtype: str, opened: list[CpuRunner], tmp_path: Path
) -> None:
    options = dataclasses.replace(
        LIMITS, dtype=dtype, quantization=quantization, kv_cache_dtype=cache_dtype, max_batch_size=64
    )
    path = NETWORKS["rope"]().compile(tmp_path / "wide.engine", options)
    runner = CpuRunner.open(path, num_blocks=64, threads=2)
    opened.append(runner)
    put(runner, tmp_path, [parts_of("rope", dtype, seed) for seed in range(8)])
    ids = random_ids(83, 64)
    chunks = [Chunk(i, [token], 0, [i], return_logits=True, adapter=i * 5 % 9) for i, token in enumerate(ids)]
    alone = [runner.step(StepPlan((chunk,))).logits[0] for chunk in chunks]
    for size in range(2, 65):
        first = size * 7 % (65 - size)
        result = runner.step(StepPlan(tuple(chunks[first : first + size])))
        for position in range(size):
            np.testing.assert_array_equal(result.logits[position], alone[first + position])


def test_a_slot_is_free_again_when_its_adapter_is_unloaded(
    engine_file: EngineFile, opened: list[CpuRunner], tmp_path: Path
) -> None:
    runner = CpuRunner.open(engine_file("rope", "float32", ""), num_blocks=64)
    opened.append(runner)
    first, second = (runner.packed(sealed(tmp_path / str(seed), parts_of("rope", "float32", seed))) for seed in (1, 2))
    ids = random_ids(83, 20)

    def logits(slot: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return runner.step(StepPlan((dataclasses.replace(prefill(runner, ids), adapter=slot),))).logits[0]

    runner.load_adapter(3, first)
    of_first = logits(3)
    with pytest.raises(InvalidArgument, match="slot 3 for adapters is not free"):
        runner.load_adapter(3, second)
    runner.unload_adapter(3)
    with pytest.raises(InternalError, match="no adapter is in slot 3"):
        logits(3)
    with pytest.raises(InvalidArgument, match="no adapter is in slot 3"):
        runner.unload_adapter(3)
    runner.load_adapter(3, second)
    runner.load_adapter(1, first)
    np.testing.assert_array_equal(logits(1), of_first)
    assert (logits(3) != of_first).any()
    for slot in (0, 4097):
        with pytest.raises(InvalidArgument, match="is not free"):
            runner.load_adapter(slot, second)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (PartShape("head", 0, 83, 42, 2), "whose rows are not those of tokens"),
        (PartShape("0.qkv", 0, 100, 43, 2), "does not have its shape"),
        (PartShape("0.qkv", 0, 100, 42, 257), "has a rank of 257"),
    ],
)
def test_the_library_refuses_matrices_that_fit_nowhere(
    shape: PartShape, words: str, engine_file: EngineFile, opened: list[CpuRunner], tmp_path: Path
) -> None:
    runner = CpuRunner.open(engine_file("rope", "float32", ""), num_blocks=64)
    opened.append(runner)
    arrays = np.zeros((shape.rank, shape.columns), np.float32), np.zeros((shape.rows, shape.rank), np.float32)
    with pytest.raises(InvalidArgument, match=words):
        runner.load_adapter(1, runner.packed(sealed(tmp_path / "s", [AdapterPart(shape, *arrays)])))


def test_parts_for_other_parameters_are_refused_before_they_are_loaded(
    engine_file: EngineFile, opened: list[CpuRunner], tmp_path: Path
) -> None:
    runner = CpuRunner.open(engine_file("rope", "float32", ""), num_blocks=64)
    opened.append(runner)
    for number, (name, height) in enumerate((("9.qkv", 100), ("0.qkv", 101))):
        parts = random_parts({name: (height, 42)})
        with pytest.raises(EngineFileError, match=f"changes {name}, which"):
            runner.packed(sealed(tmp_path / str(number), parts))
    parts = random_parts({"0.qkv": (100, 42)}, cuts={"0.qkv": ((0, 60), (59, 100))})
    with pytest.raises(EngineFileError, match=r"changes rows of 0\.qkv twice"):
        runner.packed(sealed(tmp_path / "twice", parts))
    shape = PartShape("0.qkv", 60, 40, 43, 2)
    other = AdapterPart(shape, np.zeros((2, 43), np.float32), np.zeros((40, 2), np.float32))
    parts = [*random_parts({"0.qkv": (60, 42)}), other]
    with pytest.raises(EngineFileError, match=r"matrices for 0\.qkv of adapter .* do not fit"):
        runner.packed(sealed(tmp_path / "depths", parts))
