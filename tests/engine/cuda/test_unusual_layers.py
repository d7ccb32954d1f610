"""Networks whose layers are of several kinds, on interpreted CUDA engines: logits."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest

from llmserve.builder.options import BuildOptions
from llmserve.builder.quantization import Matrix, quantized_params
from llmserve.builder.reference import ReferenceModel
from tests.engine.cpu.networks import Network, all_logits, random_ids
from tests.engine.cuda.engines import WIDE_TILES, compile_engine, open_runner
from tests.engine.cuda.hybrids import hybrid
from tests.engine.cuda.test_engine import OPTIONS, TOLERANCE
from tests.oracle import relative_error

NUM_TOKENS = 11


def reference(made: Network, options: BuildOptions) -> Matrix:
    """Logits of NUM_TOKENS tokens."""
    quantized = quantized_params(made.program, made.params, options)
    model = ReferenceModel(
        made.program, partial(made.load, dtype=options.dtype), quantized=quantized, cache=options.cache()
    )
    return model.logits(random_ids(made.program.vocab_size, NUM_TOKENS, NUM_TOKENS))


@pytest.mark.parametrize(
    ("network", "dtype", "quantization"),
    [("olmo2", "float16", "")],
)
def test_logits_are_those_of_the_reference(network: str, dtype: str, quantization: str, tmp_path: Path) -> None:
    """With a cache of integers where weights are."""
    made, cache = hybrid(network), quantization or "auto"
    options = dataclasses.replace(OPTIONS, dtype=dtype, quantization=quantization, kv_cache_dtype=cache)
    runner = open_runner(compile_engine(made, tmp_path / "e.engine", options, tiles=WIDE_TILES))
    found = all_logits(runner, random_ids(made.program.vocab_size, NUM_TOKENS, NUM_TOKENS))
    assert relative_error(found, reference(made, options)) < TOLERANCE[options.dtype]
