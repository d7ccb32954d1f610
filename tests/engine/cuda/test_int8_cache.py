"""An int8 KV cache on the interpreted device: attention as numpy computes it, memory, the law of determinism."""

from __future__ import annotations

import dataclasses
import random
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmserve.builder import attention
from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.plan import plan_build
from llmserve.builder.quantization import quantized_params
from llmserve.builder.reference import ReferenceModel, Run
from llmserve.builder.selftest import ROUNDING_CHANGES_ACCEPTED
from llmserve.builder.targets.cuda.target import CudaTarget
from llmserve.core import GenerateRequest, SamplingParams
from llmserve.engine.base import Engine
from llmserve.engine.cuda.layout import CacheHead, read_header
from llmserve.engine.cuda.runner import CudaRunner
from llmserve.engine.cuda.runtime import CudaRuntime
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.open import open_engine
from llmserve.engine.settings import EngineSettings
from llmserve.models.graph import CacheShape, Graph
from llmserve.models.number_formats import FLOATS, INT8_CACHE
from llmserve.scheduler.plan import Chunk, StepPlan
from tests.checkpoints import make_checkpoint
from tests.engine.cpu.law import run_randomly
from tests.engine.cpu.networks import LIMITS, Network, all_logits, odd_network, random_ids
from tests.engine.cuda.engines import WIDE_TILES, compile_engine, open_runner
from tests.engine.cuda.fake_device import FakeCompiler, FakeDevice
from tests.oracle import relative_error

OPTIONS = dataclasses.replace(LIMITS, target="cuda", given={"gpu": "sm_90"}, kv_cache_dtype="int8")

TILES = dataclasses.replace(WIDE_TILES, keys=16, segment=16)


@dataclasses.dataclass(frozen=True)
class Shape:
    head_dim: int
    heads: int = 2
    kv_heads: int = 2
    rotary_dim: int = 0
    window: int = 0
    soft_cap: float = 0.0
    has_alibi: bool = False

    def network(self) -> Network:
        """Nothing but one attention: its inputs are rows of a table, its outputs are the logits."""
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        rng = np.random.default_rng(self.head_dim)
        g = Graph(CacheShape(1, self.kv_heads, self.head_dim), width)
        qkv = g.embed("table", width + 2 * kv_width)
        q, k = g.slice(qkv, 0, width), g.slice(qkv, width, kv_width)
        if self.rotary_dim:
            frequencies = tuple(float(1000.0 ** (-j / self.rotary_dim)) for j in range(0, self.rotary_dim, 2))
            q, k = (g.rope(x, head_dim=self.head_dim, inv_freq=frequencies, scale=1.1) for x in (q, k))
        y = g.attention(
            q, k, g.slice(qkv, width + kv_width, kv_width), layer=0, num_heads=self.heads, num_kv_heads=self.kv_heads,
            head_dim=self.head_dim, scale=self.head_dim**-0.5, window=self.window, soft_cap=self.soft_cap,
            alibi_slopes=tuple(2.0 ** -(j + 1) for j in range(self.heads)) if self.has_alibi else (),
        )  # fmt: skip
        g.logits(g.select_rows(y), "identity")
        table = rng.standard_normal((width, width + 2 * kv_width)) * rng.lognormal(0, 1, (width, 1))
        arrays = {"table": table.astype(np.float32), "identity": np.eye(width, dtype=np.float32)}
        return Network(g.program(), arrays)


SHAPES = {
    "grouped": Shape(40, heads=6, kv_heads=2, rotary_dim=40),
    "windows": Shape(80, rotary_dim=32, window=7),
    "alibi": Shape(96, has_alibi=True),
    "capped": Shape(10, heads=3, kv_heads=1, soft_cap=1.5, window=18),
    "even": Shape(64, rotary_dim=64),
}


@pytest.mark.parametrize("name", SHAPES)
def test_attention_over_integers_is_that_of_numpy(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a scale of shares for each tile of keys. Where queries and keys are turned, last bits tip some integers."""
    network = SHAPES[name].network()
    runner = open_runner(compile_engine(network, tmp_path / "e.engine", OPTIONS, tiles=TILES))
    ids = random_ids(network.program.vocab_size, 37)
    found = scattered(runner, ids)
    as_the_cpu = network.reference(OPTIONS).logits(ids)
    exact = network.reference(LIMITS).logits(ids)
    monkeypatch.setattr(attention, "SHARE_CHUNK", TILES.keys)
    wanted = network.reference(OPTIONS).logits(ids)
    assert np.median(np.abs(found - wanted)) < 1e-6
    assert relative_error(found, wanted) < (2e-3 if SHAPES[name].rotary_dim else 2e-5)
    loss, accepted = (np.abs(each - exact).mean() for each in (found, as_the_cpu))
    assert 0 < loss < 1.001 * accepted, "no more than what the CPU's chunks cost"


def test_logits_do_not_depend_on_who_else_is_in_the_step(tmp_path: Path) -> None:
    """In pieces, over blocks strewn about the pool, beside another sequence: to the bit."""
    network = SHAPES["capped"].network()
    runner = open_runner(compile_engine(network, tmp_path / "e.engine", OPTIONS, tiles=TILES))
    prompts = [random_ids(network.program.vocab_size, length, length) for length in (21, 6)]
    alone = [all_logits(runner, ids) for ids in prompts]
    for found, wanted in zip(run_randomly(runner, prompts, random.Random(4)), alone, strict=True):
        assert_same_bits(found, wanted)


def test_many_rows_and_few_add_up_in_the_same_order(tmp_path: Path) -> None:
    """Beyond SPLIT_ROWS one program meets all segments. A prefix that is in the cache is as good as one just computed,
    and so is one in other blocks."""
    network = SHAPES["capped"].network()
    runner = open_runner(compile_engine(network, tmp_path / "e.engine", OPTIONS, tiles=TILES))
    few, many = ({runner.header.kernels[launch.kernel].function for launch in runner.header.launches
                  if launch.least_rows <= rows <= launch.most_rows} for rows in (64, 65))  # fmt: skip
    assert "attention.attention_segments" in few - many
    assert "attention.attention" in many - few
    ids, blocks = random_ids(network.program.vocab_size, 70), list(range(18))
    together = all_logits(runner, ids)
    for table in (blocks, [*blocks[:15], 40, 41, 42]):
        rest = runner.step(StepPlan((Chunk(0, ids[60:], 60, table, return_logits=True),)))
        assert_same_bits(rest.logits[0], together[60:])


@pytest.mark.parametrize(("dtype", "quantization"), [("float16", "int8"), ("bfloat16", "int4")])
def test_it_goes_with_every_format_of_weights(dtype: str, quantization: str, tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, dtype=dtype, quantization=quantization)
    network = odd_network(layers=1)
    runner = open_runner(compile_engine(network, tmp_path / "e.engine", options, tiles=TILES))
    ids = random_ids(83, 18)
    quantized = quantized_params(network.program, network.params, options)
    model = ReferenceModel(network.program, partial(network.load, dtype=dtype), quantized=quantized, cache=INT8_CACHE)
    wanted, exact = model.logits_of([Run(ids), Run(ids, rounds=False)])
    accepted = ROUNDING_CHANGES_ACCEPTED * relative_error(exact, wanted)
    assert relative_error(all_logits(runner, ids), wanted) < FLOATS[dtype].tolerance + accepted


def test_memory_is_that_of_integers_and_scales(tmp_path: Path) -> None:
    """Of a block of 4 positions and 40 dimensions: 160 bytes; behind them 2 or 1 scales of each position."""
    path = compile_engine(SHAPES["grouped"].network(), tmp_path / "e.engine", OPTIONS, tiles=TILES)
    assert read_header(path).kv_bytes_per_block == 2 * (160 + 32 + 160 + 16)
    sizes = []
    for num_blocks in (10, 30):
        device = FakeDevice()
        runner = CudaRunner(path, device, num_blocks=num_blocks, threads=1)
        sizes.append(device.used_bytes)
        assert runner.info.gpu_bytes == device.used_bytes
        runner.close()
    assert sizes[1] - sizes[0] == 20 * 736
    assert CacheHead("int8", 4, 10).key_bytes == 48 + 16, "numbers are filled up to what a thread loads at once"
    assert CacheHead("int8", 32, 128).key_bytes + CacheHead("int8", 32, 128).value_bytes == 32 * (128 + 16 + 128 + 4)
    assert CacheHead("float16", 32, 128).key_bytes == CacheHead("float16", 32, 128).value_bytes == 32 * 256


async def test_an_engine_passes_its_self_test_and_answers_as_the_cpu_engine(tmp_path: Path) -> None:
    """Prompts in pieces, then from the prefix cache. In float32 last bits differ; the tokens of this network do not."""
    checkpoint = make_checkpoint(tmp_path / "c", "qwen2", dtype="bfloat16", num_hidden_layers=1)
    limits = {"dtype": "float32", "max_seq_len": 48, "max_num_tokens": 16, "max_batch_size": 4, "tokens_per_block": 4}
    common = BuildOptions(kv_cache_dtype="int8", **limits)  # type: ignore[arg-type]
    build_engine(checkpoint, tmp_path / "cpu", common)
    options = dataclasses.replace(common, target="cuda", given={"gpu": "sm_90"})
    target = CudaTarget(FakeCompiler(), TILES)
    manifest = build_engine(checkpoint, tmp_path / "cuda", options, target=target)
    assert manifest.dtype == "float32+kv-int8"
    directory, runtime = EngineDirectory.open(tmp_path / "cuda"), CudaRuntime(lambda ordinal: FakeDevice())
    plan = plan_build(checkpoint, options, measure=lambda: 0.0)
    assert plan.cache_dtype == "int8"
    assert plan.kv_bytes_per_token * 4 == read_header(directory.engine_file).kv_bytes_per_block
    result = runtime.selftest(directory)
    assert result is not None
    assert result.passed, str(result)
    prompt = tuple(random_ids(320, 21))
    with (
        closing(open_engine(tmp_path / "cpu", EngineSettings(threads=1))) as cpu,
        closing(runtime.open(directory, EngineSettings(threads=1))) as cuda,
    ):
        wanted = await answer(cpu, prompt)
        assert await answer(cuda, prompt) == wanted
        assert cuda.stats().reused_blocks == 0
        assert await answer(cuda, prompt) == wanted
        assert cuda.stats().reused_blocks == 5


def scattered(runner: CudaRunner, ids: list[int]) -> NDArray[np.float32]:
    """Logits, over blocks strewn about the pool."""
    blocks = random.Random(1).sample(range(runner.info.num_blocks), -(-len(ids) // runner.info.block_size))
    return runner.step(StepPlan((Chunk(0, ids, 0, blocks, return_logits=True),))).logits[0]


async def answer(engine: Engine, prompt: tuple[int, ...]) -> list[int]:
    request = GenerateRequest("r", prompt, SamplingParams(max_tokens=6, temperature=0.0))
    return [token async for event in engine.submit(request) for token in event.token_ids]


def assert_same_bits(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> None:
    assert np.isfinite(wanted).all()
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))
