"""Networks whose layers are of several kinds, on interpreted CUDA engines: logits, and bits wherever they were cut."""

from __future__ import annotations

import dataclasses
import random
from functools import partial
from pathlib import Path

import pytest

from llmserve.builder.options import BuildOptions
from llmserve.builder.quantization import Matrix, quantized_params
from llmserve.builder.reference import ReferenceModel
from llmserve.builder.targets.cuda.target import CudaTarget
from llmserve.engine.cuda.layout import LayerHeads, read_header
from tests.engine.cpu.law import run_randomly
from tests.engine.cpu.networks import Network, all_logits, random_ids
from tests.engine.cuda.engines import WIDE_TILES, compile_engine, open_runner
from tests.engine.cuda.hybrids import hybrid
from tests.engine.cuda.test_engine import OPTIONS, TOLERANCE, assert_same_bits
from tests.oracle import relative_error

NUM_TOKENS = 11
SENSITIVE = 2  # times the usual error: Gemma 4 does not divide scores by the root of the head size


def reference(made: Network, options: BuildOptions) -> Matrix:
    """Logits of NUM_TOKENS tokens."""
    quantized = quantized_params(made.program, made.params, options)
    model = ReferenceModel(
        made.program, partial(made.load, dtype=options.dtype), quantized=quantized, cache=options.cache()
    )
    return model.logits(random_ids(made.program.vocab_size, NUM_TOKENS, NUM_TOKENS))


@pytest.mark.parametrize(
    ("network", "dtype", "quantization"),
    [
        ("olmo2", "float16", ""),
        ("gemma4", "float32", ""),
        ("gemma4", "float32", "int8"),
        ("gemma3n", "float32", ""),
        ("stablelm", "float32", ""),
        ("ministral3", "float32", ""),
        ("hunyuan", "float16", ""),
    ],
)
def test_logits_are_those_of_the_reference(network: str, dtype: str, quantization: str, tmp_path: Path) -> None:
    """With a cache of integers where weights are."""
    made, cache = hybrid(network), quantization or "auto"
    options = dataclasses.replace(OPTIONS, dtype=dtype, quantization=quantization, kv_cache_dtype=cache)
    runner = open_runner(compile_engine(made, tmp_path / "e.engine", options, tiles=WIDE_TILES))
    found = all_logits(runner, random_ids(made.program.vocab_size, NUM_TOKENS, NUM_TOKENS))
    assert relative_error(found, reference(made, options)) < TOLERANCE[options.dtype]


def test_layers_with_other_heads_have_caches_of_their_own(tmp_path: Path) -> None:
    """Logits do not depend on the cuts."""
    made, options = hybrid("gemma4"), dataclasses.replace(OPTIONS, dtype="float16")
    path = compile_engine(made, tmp_path / "e.engine", options, tiles=WIDE_TILES)
    header = read_header(path)
    assert header.layer_heads == (LayerHeads(2, 20), LayerHeads(1, 36))
    assert header.kv_bytes_per_block == 2 * 2 * (2 * 20 + 36) * header.block_size
    assert CudaTarget().kv_bytes_per_token(made.program, options) * header.block_size == header.kv_bytes_per_block
    runner = open_runner(path)
    prompts = [random_ids(83, length, length) for length in (NUM_TOKENS, 3)]
    alone = [all_logits(runner, ids) for ids in prompts]
    assert relative_error(alone[0], reference(made, options)) < SENSITIVE * TOLERANCE[options.dtype]
    for found, wanted in zip(run_randomly(runner, prompts, random.Random(4)), alone, strict=True):
        assert_same_bits(found, wanted)
