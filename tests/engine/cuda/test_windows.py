"""Layers with a window give back the blocks that they cannot read any more, on interpreted CUDA engines."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from contextlib import aclosing, closing
from pathlib import Path

import numpy as np
import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.targets.cuda.target import CudaTarget
from llmserve.core import GenerateRequest, SamplingParams
from llmserve.engine.base import RunnerInfo, StepResult
from llmserve.engine.cuda.layout import Address, LayerHeads, Room, read_header
from llmserve.engine.cuda.runner import CudaRunner, fixed_bytes
from llmserve.engine.cuda.runtime import CudaRuntime
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.inflight import InflightEngine
from llmserve.engine.settings import EngineSettings
from llmserve.errors import InvalidArgument, ResourceExhausted
from llmserve.scheduler.plan import StepPlan
from llmserve.scheduler.settings import NO_WINDOWS, Policy, SchedulerSettings, WindowedLayers
from tests.checkpoints import make_checkpoint
from tests.engine.cpu.networks import all_logits, odd_network, random_ids
from tests.engine.cpu.test_windows import sliding_logits
from tests.engine.cuda.engines import WIDE_TILES, compile_engine, open_runner
from tests.engine.cuda.fake_device import FakeCompiler, FakeDevice
from tests.engine.cuda.hybrids import hybrid
from tests.engine.cuda.test_engine import OPTIONS, assert_same_bits

LENGTH = 40


class Written:
    """A runner whose blocks can be filled with anything."""

    def __init__(self, runner: CudaRunner) -> None:
        self._runner = runner

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    def step(self, plan: StepPlan) -> StepResult:
        return self._runner.step(plan)

    def write_block(self, block: int, content: bytes) -> None:
        """All parts of it, whichever layers they are of."""
        header, device = self._runner.header, self._runner.device
        for layer, sizes in enumerate(header.plane_bytes):
            for room, num_bytes in zip((Room.KEYS, Room.VALUES), sizes, strict=True):
                place = self._runner.place(Address(room.value, str(layer)))
                device.write(place + block * num_bytes, np.frombuffer(content[:num_bytes], np.uint8))
        device.synchronize()


@pytest.mark.parametrize(
    ("kind", "dtype", "quantization", "cache_dtype"),
    [
        ("rope", "float16", "", "auto"),
        ("peculiar", "float32", "", "int8"),
        ("alibi", "float16", "int8", "int8"),
    ],
)
def test_logits_are_those_of_a_cache_that_keeps_everything(
    kind: str, dtype: str, quantization: str, cache_dtype: str, tmp_path: Path
) -> None:
    network = odd_network(alibi=kind == "alibi", peculiar=kind == "peculiar")
    options = dataclasses.replace(OPTIONS, dtype=dtype, quantization=quantization, kv_cache_dtype=cache_dtype)
    path = compile_engine(network, tmp_path / "e.engine", options)
    ids = random_ids(83, LENGTH)
    with closing(open_runner(path)) as runner:
        assert runner.info.windowed_layers.num_tables == 0
        wanted = all_logits(runner, ids)
    with closing(open_runner(path, keeps_all=False)) as runner:
        assert runner.info.windowed_layers.num_tables == 2
        assert_same_bits(sliding_logits(Written(runner), ids, random.Random(kind)), wanted)


OPTIONS_OF_COHERE = BuildOptions(
    target="cuda", given={"gpu": "sm_90"}, dtype="float32", tokens_per_block=8, max_num_tokens=64, max_batch_size=4,
    max_seq_len=192,
)  # fmt: skip
PROMPT = tuple(range(7, 7 + 150))
SAMPLING = SamplingParams(max_tokens=6, temperature=0.9, seed=5)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> EngineDirectory:
    """Two of its three layers read 16 tokens."""
    folder = tmp_path_factory.mktemp("windowed")
    checkpoint, target = make_checkpoint(folder / "c", "cohere2"), CudaTarget(FakeCompiler(), WIDE_TILES)
    build_engine(checkpoint, folder / "e", OPTIONS_OF_COHERE, target=target)
    return EngineDirectory.open(folder / "e")


def told(engine: InflightEngine) -> tuple[list[tuple[int, ...]], list[int]]:
    """Tokens of two requests at once, and of the first one again; and how many tokens of each prompt were found."""
    first, second = (GenerateRequest(name, PROMPT[:length], SAMPLING) for name, length in (("a", 150), ("b", 70)))

    async def answer(request: GenerateRequest) -> tuple[tuple[int, ...], int]:
        async with aclosing(engine.submit(request)) as events:
            found = [event async for event in events]
        [cached] = [event.usage.cached_tokens for event in found if event.finish_reason and event.usage]
        return tuple(token for event in found for token in event.token_ids), cached

    async def every() -> list[tuple[tuple[int, ...], int]]:
        return [*await asyncio.gather(answer(first), answer(second)), await answer(first)]

    answers = asyncio.run(every())
    return [tokens for tokens, _ in answers], [cached for _, cached in answers]


def test_answers_are_those_of_a_cache_that_keeps_everything(windowed: EngineDirectory) -> None:
    """While steps begin before the last one's tokens are known. Blocks have one of the three layers, so that a sequence
    fits in less memory."""
    of_one = -(-156 // 8) + 2 * (-(-(15 + 64) // 8) + 1)
    cases = [(True, 40, Policy.MAX_UTILIZATION), *((False, of_one + 2, policy) for policy in Policy)]
    found = []
    for keeps_all, num_blocks, policy in cases:
        runner = CudaRunner(windowed.engine_file, FakeDevice(), num_blocks=num_blocks, threads=1, keeps_all=keeps_all)
        with closing(InflightEngine(runner, windowed.info(), SchedulerSettings(policy=policy))) as engine:
            answers, cached = told(engine)
            assert engine.stats().used_num_blocks == 0
        found.append(answers)
        assert cached[-1] >= 144, "what was computed before is found"
    assert found[0] == found[1] == found[2]
    runner = CudaRunner(windowed.engine_file, FakeDevice(), num_blocks=(of_one + 2) // 3, threads=1)
    with (
        closing(InflightEngine(runner, windowed.info())) as engine,
        pytest.raises(InvalidArgument, match="most 112"),
    ):
        told(engine)


OF_WINDOW, OF_SEQUENCE = -(-(15 + 64) // 8) + 1, 192 // 8
FOR_BATCH = 4 * (OF_SEQUENCE + 2 * OF_WINDOW) + 2 * 64 // 8


@pytest.mark.parametrize(
    ("settings", "num_blocks"), [(EngineSettings(max_kv_tokens=80), 80 // 8), (EngineSettings(), FOR_BATCH // 3)]
)
def test_the_pool_takes_the_memory_that_it_says(
    settings: EngineSettings, num_blocks: int, windowed: EngineDirectory
) -> None:
    device = FakeDevice()
    with closing(CudaRuntime(lambda ordinal: device).open(windowed, settings)) as engine:
        assert engine.stats().max_num_blocks == num_blocks
        assert engine.stats().gpu_mem_usage == device.used_bytes


def test_memory_for_one_sequence_is_enough(windowed: EngineDirectory) -> None:
    """What an engine needs that keeps all is not asked for."""
    header = read_header(windowed.engine_file)
    layout, whole = header.cache_layout(), header.cache_layout(keeps_all=True)
    assert layout.block_bytes * 3 == header.kv_bytes_per_block == whole.block_bytes
    needed = (OF_SEQUENCE + 2 * OF_WINDOW) * layout.block_bytes
    assert needed < OF_SEQUENCE * whole.block_bytes
    settings = EngineSettings(kv_cache_fraction=1.0)
    least = fixed_bytes(header, layout) + needed
    with closing(CudaRuntime(lambda ordinal: FakeDevice(total_bytes=least)).open(windowed, settings)) as engine:
        assert engine.stats().max_num_blocks == (OF_SEQUENCE + 2 * OF_WINDOW) // 3
    with pytest.raises(ResourceExhausted, match="room for one sequence of 192 tokens"):
        CudaRuntime(lambda ordinal: FakeDevice(total_bytes=least - 1)).open(windowed, settings)


def test_layers_with_other_heads_keep_all_blocks(windowed: EngineDirectory) -> None:
    header = read_header(windowed.engine_file)
    assert header.cache_layout().windowed_layers == WindowedLayers(16, 2)
    others = (LayerHeads(2, 8), *(LayerHeads(header.num_kv_heads, header.head_dim),) * 2)
    assert dataclasses.replace(header, layer_heads=others).cache_layout().windowed_layers == NO_WINDOWS


def test_a_plan_counts_what_layers_can_still_read() -> None:
    """Nothing less where they have other heads."""
    options, odd, gemma = dataclasses.replace(OPTIONS, dtype="float32"), odd_network(layers=2), hybrid("gemma4")
    for program, num_kept in ((odd.program, 24 + 19), (gemma.program, 2 * 24)):
        whole = CudaTarget().kv_bytes_per_token(program, options) * options.tokens_per_block
        assert CudaTarget().kv_bytes_of(program, options, 96) * 2 == num_kept * whole


def test_a_block_that_is_given_back_too_early_is_seen(tmp_path: Path) -> None:
    path = compile_engine(odd_network(layers=2), tmp_path / "e.engine", dataclasses.replace(OPTIONS, dtype="float16"))
    ids = random_ids(83, 24)
    with closing(open_runner(path, keeps_all=False)) as runner:
        right, wrong = (sliding_logits(Written(runner), ids, random.Random(1), early) for early in (0, 4))
    assert not np.array_equal(right, wrong)
