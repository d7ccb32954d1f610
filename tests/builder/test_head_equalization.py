"""Powers of two moved between queries and keys change no score, and make the large dimensions of keys cost less."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmserve.builder.build import build_engine
from llmserve.builder.equalization import Equalization, Factors
from llmserve.builder.head_equalization import equalize_heads
from llmserve.builder.options import BuildOptions
from llmserve.builder.pieces import one_by_one
from llmserve.builder.quantization import Int8, Quantized, quantize_rows
from llmserve.builder.reference import ReferenceModel
from llmserve.builder.resolve import resolve
from llmserve.builder.rounding import prepare_rounding
from llmserve.checkpoint.integers import Integers
from llmserve.checkpoint.reader import Checkpoint
from llmserve.engine.cpu.runner import CpuRunner
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.verify import verify_engine
from llmserve.models.number_formats import FLOAT32, INT8_CACHE, NumberFormat
from llmserve.progress import SilentProgress
from tests.checkpoints import KINDS, make_checkpoint, random_tensors, write_tensors
from tests.engine.cpu.networks import LIMITS, Network, all_logits, odd_network, random_ids

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 10  # of odd_network
KEYS = HEADS * HEAD_DIM  # where the rows of keys begin
IDS = random_ids(83, 40)


def planted(network: Network) -> Network:
    """With biases of keys, of one pair of dimensions in each KV head, that are far larger than everything else."""
    arrays = {name: array.copy() for name, array in network.arrays.items()}
    for i in range(3):
        for head in range(KV_HEADS):
            for d in (1, 6):  # a pair of the five that the embedding turns
                arrays[f"{i}.qkv_bias"][KEYS + head * HEAD_DIM + d] = 150.0
                arrays[f"{i}.qkv"][head * 30 + d : head * 30 + 30 : HEAD_DIM] /= 16
                arrays[f"{i}.qkv_bias"][head * 30 + d : head * 30 + 30 : HEAD_DIM] /= 16
    return Network(network.program, arrays)


def found_for(network: Network) -> Factors:
    return equalize_heads(network.program, network.arrays.__getitem__)


def equalized(network: Network) -> Network:
    load = Equalization({}, {}).with_rows(found_for(network)).apply(network.arrays.__getitem__)
    return Network(network.program, {name: load(name)[: len(array)] for name, array in network.arrays.items()})


def logits(network: Network, cache: NumberFormat) -> NDArray[np.float32]:
    return ReferenceModel(network.program, network.arrays.__getitem__, cache=cache).logits(IDS)


@pytest.mark.parametrize("form", [{}, {"head_norms": False}, {"head_norms": False, "alibi": True},
                                  {"head_norms": False, "peculiar": True}])  # fmt: skip
def test_a_float32_engine_computes_the_same_bits(form: dict[str, bool], tmp_path: Path) -> None:
    network = planted(odd_network(**form))
    changed = equalized(network)
    assert any((changed.arrays[name] != array).any() for name, array in network.arrays.items())
    np.testing.assert_array_equal(logits(changed, FLOAT32), logits(network, FLOAT32))
    found = []
    for number, each in enumerate((network, changed)):
        with closing(CpuRunner.open(each.compile(tmp_path / str(number), LIMITS), num_blocks=24)) as runner:
            found.append(all_logits(runner, IDS))
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("alibi", [False, True])
def test_large_dimensions_of_keys_cost_less_in_integers(alibi: bool) -> None:
    network = planted(odd_network(head_norms=False, alibi=alibi))
    exact = logits(network, FLOAT32)

    def error(of: Network) -> float:
        return float(np.sqrt(np.square(logits(of, INT8_CACHE) - exact).mean()))

    assert error(equalized(network)) < error(network) / 3


def test_a_pair_that_is_turned_has_one_factor_and_all_queries_of_a_key_have_its_inverse() -> None:
    network = planted(odd_network(head_norms=False, peculiar=True))
    found = found_for(network)
    assert found.keys() == {f"{i}.{name}" for i in range(3) for name in ("qkv", "qkv_bias")}
    for i, num_pairs in enumerate((3, 5, 3)):  # the others of a head of ten are not turned
        factors = found[f"{i}.qkv"]
        np.testing.assert_array_equal(found[f"{i}.qkv_bias"], factors)
        keys = factors[KEYS : KEYS + KV_HEADS * HEAD_DIM].reshape(KV_HEADS, HEAD_DIM)
        queries = factors[:KEYS].reshape(KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        np.testing.assert_array_equal(queries, np.repeat(1 / keys[:, None], HEADS // KV_HEADS, axis=1))
        np.testing.assert_array_equal(keys[:, :num_pairs], keys[:, num_pairs : 2 * num_pairs])
        assert (keys[:, 6] < 1).all()
        assert (factors[KEYS + KV_HEADS * HEAD_DIM :] == 1).all()  # the values
        assert (np.frexp(factors)[0] == 0.5).all()


def test_where_heads_are_normalized_the_norms_take_the_factors() -> None:
    network = odd_network()
    network.arrays["1.k_norm"][[2, 7]] *= 64
    found = found_for(network)
    assert {name for name in found if name.startswith("1.")} == {"1.q_norm", "1.k_norm"}
    np.testing.assert_array_equal(found["1.k_norm"], 1 / found["1.q_norm"])
    assert found["1.q_norm"][2] == found["1.q_norm"][7] >= 4
    assert not found_for(odd_network(peculiar=True))  # a weight that an offset is added to takes no factor exactly


def test_nothing_grows_out_of_float16() -> None:
    """One pair whose keys are far larger than those of other pairs, whose queries are large, too."""
    network = odd_network(head_norms=False)
    network.arrays["0.qkv"][:] = 0
    bias = network.arrays["0.qkv_bias"]
    bias[:KEYS], bias[KEYS : KEYS + KV_HEADS * HEAD_DIM] = 500.0, 2.0**-10
    bias[KEYS : KEYS + KV_HEADS * HEAD_DIM : 5] = 6e4
    factors = found_for(network)["0.qkv_bias"]
    assert factors[0] > 1 > factors[KEYS]
    assert np.isfinite((bias * factors).astype(np.float16)).all()


def test_integers_of_the_checkpoint_are_kept() -> None:
    class Stored:
        shape = (4, 64)
        values = np.random.default_rng(0).integers(-127, 128, shape).astype(np.int16)
        steps = np.random.default_rng(1).uniform(0.01, 0.1, (4, 2)).astype(np.float16).astype(np.float32)

        def integers(self, rows: slice, /) -> Integers:
            return Integers(self.values[rows], self.steps[rows])

        def __getitem__(self, rows: slice, /) -> NDArray[np.float32]:
            return (self.values[rows] * np.repeat(self.steps[rows], 32, axis=1)).astype(np.float32)

    factors = np.array([1, 0.125, 8, 2.0**-9], np.float32)
    weight = Equalization({}, {}).with_rows({"w": factors}).apply(lambda name: Stored())("w")
    found = quantize_rows(Int8(), weight, slice(0, 4))
    assert isinstance(found, Quantized)
    np.testing.assert_array_equal(found.values, Stored.values)
    np.testing.assert_array_equal(found.weight, Stored()[0:4] * factors[:, None])


@pytest.mark.parametrize("cache", ["auto", "int8"])
def test_only_engines_that_round_keys_are_equalized(cache: str, tmp_path: Path) -> None:
    """So the digests of all others stay what they were."""
    checkpoint = make_checkpoint(tmp_path / "c", "qwen2")
    tensors = random_tensors(dict(KINDS["qwen2"]), dtype="float32", seed=0)
    for name, tensor in tensors.items():
        if name.endswith("k_proj.bias"):
            tensor[0] = 20.0
    write_tensors(checkpoint, tensors, "safetensors")
    options = BuildOptions(dtype="float16", max_num_tokens=64, max_seq_len=64, kv_cache_dtype=cache)
    with Checkpoint.open(checkpoint) as opened:
        digests = prepare_rounding(resolve(opened, options), SilentProgress(), one_by_one).digests
    assert ("layers.0.attn.qkv.bias.rows" in digests) == (cache == "int8")
    assert bool(digests) == (cache == "int8")
    build_engine(checkpoint, tmp_path / "e", options)
    result = verify_engine(EngineDirectory.open(tmp_path / "e"))
    assert result is not None
    assert result.passed
