"""The engine's logits against the numpy reference: every instruction set, every number format, int8 included."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmserve.builder.quantization import Int4, Int8, Scheme
from llmserve.checkpoint.plan import plan_weights
from llmserve.checkpoint.reader import Checkpoint
from llmserve.core import SamplingParams
from llmserve.engine.cpu.runner import available_isas
from llmserve.models.graph import CacheShape, Graph
from llmserve.models.number_formats import INT4, QUANTIZED
from llmserve.models.registry import architecture_for
from llmserve.scheduler.plan import Chunk, SampleRequest, StepPlan
from tests.checkpoints import make_checkpoint
from tests.engine.cpu.conftest import NETWORKS, EngineFile, OpenRunner
from tests.engine.cpu.networks import LIMITS, Network, all_logits, integer_product, odd_network, random_ids
from tests.engine.cpu.other_process import ISAS, PROGRAM
from tests.oracle import relative_error

KINDS = (
    "baichuan2-7b",
    "baichuan2-13b",
    "baichuan1-7b",
    "llama",
    "llama3-rope",
    "llama-tied",
    "mistral",
    "qwen2",
    "qwen3",
)
# The cache is kept in the engine's dtype: 11 or 8 significant bits of k and v, where the reference has 24.
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("network", NETWORKS)
def test_float_engines_agree_with_the_reference(
    network: str, dtype: str, isa: str, engine_file: EngineFile, open_runner: OpenRunner
) -> None:
    runner = open_runner(engine_file(network, dtype, ""), isa=isa, threads=2)
    ids = random_ids(runner.info.vocab_size, 50)
    wanted = NETWORKS[network]().reference(dataclasses.replace(LIMITS, dtype=dtype)).logits(ids)
    assert error_of(network, all_logits(runner, ids), wanted) < TOLERANCE[dtype]


def error_of(network: str, found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """Of mixtures of experts that of most positions: where integers are rounded, a last bit can tip a choice over."""
    if network not in ("experts", "routers"):
        return relative_error(found, wanted)
    return float(np.median(np.abs(found - wanted).max(axis=1)) / np.abs(wanted).max())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("network", ["experts", "routers", "rope", "peculiar", "plain"])
def test_quantized_engines_agree_with_integer_arithmetic_in_numpy(
    network: str, quantization: str, isa: str, engine_file: EngineFile, open_runner: OpenRunner
) -> None:
    options = dataclasses.replace(LIMITS, quantization=quantization)
    runner = open_runner(engine_file(network, "float32", quantization), isa=isa, threads=2)
    ids = random_ids(runner.info.vocab_size, 50, seed=2)
    wanted = NETWORKS[network]().reference(options).logits(ids)
    found = all_logits(runner, ids)
    exact = NETWORKS[network]().reference(LIMITS).logits(ids)
    # A sum that rounds differently can move an activation to the neighbouring integer, so a few logits differ more.
    assert np.median(np.abs(found - wanted)) < 2e-5
    assert error_of(network, found, wanted) < (4e-2 if network == "peculiar" else 2e-2)
    assert error_of(network, exact, wanted) > 1e-2, "integer arithmetic should be visible"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("network", NETWORKS)
def test_a_cache_of_integers_is_rounded_as_the_reference_rounds_it(
    network: str, isa: str, engine_file: EngineFile, open_runner: OpenRunner
) -> None:
    options = dataclasses.replace(LIMITS, dtype="float32", kv_cache_dtype="int8")
    runner = open_runner(engine_file(network, "float32", "", "int8"), isa=isa, threads=2)
    ids = random_ids(runner.info.vocab_size, 50)
    wanted = NETWORKS[network]().reference(options).logits(ids)
    found = all_logits(runner, ids)
    exact = NETWORKS[network]().reference(LIMITS).logits(ids)
    assert np.median(np.abs(found - wanted)) < 3e-5
    assert error_of(network, found, wanted) < 1e-2  # a last bit can tip a value over to the neighbouring integer
    assert error_of(network, exact, wanted) > 5e-3, "rounded keys and values should be visible"


@pytest.mark.parametrize("network", NETWORKS)
def test_attention_over_integers_is_that_of_the_reference_over_many_positions(
    network: str, tmp_path: Path, open_runner: OpenRunner
) -> None:
    """Shares have a scale for every 256 positions; attention alone is rounded."""
    options = dataclasses.replace(LIMITS, kv_cache_dtype="int8", max_seq_len=600, max_num_tokens=600)
    runner = open_runner(NETWORKS[network]().compile(tmp_path / "long.engine", options), num_blocks=150)
    ids = random_ids(runner.info.vocab_size, 600)
    wanted = NETWORKS[network]().reference(options).logits(ids)
    found = all_logits(runner, ids)
    assert np.median(np.abs(found - wanted)) < 2e-5
    assert error_of(network, found, wanted) < 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture(kind: str, tmp_path: Path, open_runner: OpenRunner) -> None:
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path / kind, kind, with_tokenizer=False))
    architecture = architecture_for(checkpoint.config)
    spec = architecture.from_hf(checkpoint.config)
    params = architecture.params(spec)
    plan = plan_weights(checkpoint, params, architecture.ignored)
    network = Network(architecture.program(spec), {param.name: plan.load(param.name, "float32") for param in params})
    runner = open_runner(network.compile(tmp_path / "rank0.engine", LIMITS))
    ids = random_ids(spec.vocab_size, 70)
    assert relative_error(all_logits(runner, ids), network.reference(LIMITS).logits(ids)) < 1e-5
    checkpoint.close()


def _quantized_layer(rows: int, depth: int, columns: int, scheme: Scheme) -> tuple[Network, NDArray[np.float32]]:
    """Embedding, one quantized layer, and a head in float32 that only passes its output on."""
    rng = np.random.default_rng(depth)
    x = (rng.standard_normal((rows, depth)) * 3).astype(np.float32)
    x[1] = 0.0
    g = Graph(CacheShape(1, 1, 2), rows)
    hidden = g.linear(g.embed("x", depth), "weight", columns, bias="bias")
    g.logits(g.select_rows(hidden), "head")
    arrays = {
        "x": x,
        "weight": rng.standard_normal((columns, depth)).astype(np.float32),
        "bias": rng.standard_normal(columns).astype(np.float32),
        "head": np.eye(columns, dtype=np.float32),
    }
    arrays["weight"][0] = 0.0
    network = Network(g.program(), arrays, kept=frozenset({"head"}))
    return network, integer_product(x, arrays["weight"], scheme) + arrays["bias"]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scheme", [Int8(), Int4()], ids=lambda scheme: scheme.format.name)
@pytest.mark.parametrize("depth", [1, 16, 31, 64, 200])
def test_one_quantized_layer_is_exact(
    scheme: Scheme, depth: int, isa: str, tmp_path: Path, open_runner: OpenRunner
) -> None:
    """Sums within a group have no rounding: what is left are the last bits of a few floats."""
    columns = 21
    network, wanted = _quantized_layer(columns, depth, columns, scheme)
    options = dataclasses.replace(LIMITS, quantization=scheme.format.name)
    runner = open_runner(network.compile(tmp_path / "layer.engine", options), isa=isa, threads=2)
    found = all_logits(runner, list(range(columns)))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("isa", ISAS)
def test_rows_of_eight_bits_beside_rows_of_four(
    isa: str, tmp_path: Path, open_runner: OpenRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, options = odd_network(), dataclasses.replace(LIMITS, quantization="int4")
    of_four = network.reference(options).logits(ids := random_ids(83, 50, seed=1))
    monkeypatch.setitem(QUANTIZED, "int4", dataclasses.replace(INT4, most_bits=9.0))
    wanted = network.reference(options).logits(ids)
    runner = open_runner(network.compile(tmp_path / "mixed.engine", options), isa=isa, threads=2)
    assert relative_error(all_logits(runner, ids), wanted) < 2e-2
    assert relative_error(of_four, wanted) > 2e-2, "more bits should be visible"


@pytest.mark.parametrize(("dtype", "quantization"), [("float16", ""), ("bfloat16", "int8"), ("float32", "int4")])
def test_isas_with_fused_multiply_add_agree_to_the_bit(
    dtype: str, quantization: str, engine_file: EngineFile, open_runner: OpenRunner
) -> None:
    """Sixteen lanes in one, two or four registers: such machines give the same tokens, x86 and ARM alike."""
    path, ids = engine_file("rope", dtype, quantization), random_ids(83, 60)
    runners = [open_runner(path, isa=isa) for isa in ISAS if isa != "portable"]
    if PROGRAM:  # and those of this machine
        runners += [open_runner(path, isa=isa, program=()) for isa in available_isas() if isa != "portable"]
    if len(runners) < 2:
        pytest.skip("needs two instruction sets with fused multiply-add")
    params = SamplingParams(temperature=0.9, top_k=40, top_p=0.9, seed=5)
    draw = Chunk(0, ids, 0, list(range(15)), SampleRequest(params, 0, len(ids), log_prob=True), return_logits=True)
    first, *others = (runner.step(StepPlan((draw,))) for runner in runners)
    for other in others:
        np.testing.assert_array_equal(first.logits[0], other.logits[0])
        assert (first.tokens, first.log_probs) == (other.tokens, other.log_probs)


def test_chunks_without_a_wish_return_nothing(engine_file: EngineFile, open_runner: OpenRunner) -> None:
    runner = open_runner(engine_file("rope", "float32", ""))
    result = runner.step(StepPlan((Chunk(1, [1, 2, 3], 0, [0]), Chunk(2, [4, 5], 0, [1]))))
    assert (result.tokens, result.log_probs, result.logits) == ([], [], {})
