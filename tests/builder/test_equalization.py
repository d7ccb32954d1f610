"""What is moved between weights changes nothing that the network computes, and makes it round better."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from llmserve.builder.equalization import Equalization, MeasuredSizes, equalize, powers_of_two
from llmserve.builder.quantization import quantized_params
from llmserve.builder.reference import ReferenceModel
from tests.engine.cpu.networks import LIMITS, Network, odd_network, random_ids

OPTIONS = replace(LIMITS, quantization="int8")
IDS = random_ids(83, 40)


def planted(network: Network, factor: float) -> Network:
    """The same function, with channels of norms, up-projections and values that are `factor` times as large."""
    arrays = {name: array.copy() for name, array in network.arrays.items()}
    for i in range(3):
        for norm, reader in ((f"{i}.norm", f"{i}.qkv"), (f"{i}.mlp_norm", f"{i}.gate_up")):
            arrays[norm][[3, 17]] *= factor
            arrays[reader][:, [3, 17]] /= factor
        arrays[f"{i}.gate_up"][37 + 5] *= factor  # of 37 gates and 37 ups
        arrays[f"{i}.down"][:, 5] /= factor
        values = 60 + 20 + 12  # of the second KV head, which queries 3 to 5 read
        arrays[f"{i}.qkv"][values] *= factor
        arrays[f"{i}.qkv_bias"][values] *= factor
        arrays[f"{i}.out"][:, [32, 42, 52]] /= factor
    return Network(network.program, arrays)


def found_for(network: Network) -> Equalization:
    names = quantized_params(network.program, network.params, OPTIONS)
    return equalize(network.program, names, network.arrays.__getitem__, lambda name, num_bytes: None)


def logits(network: Network, equalization: Equalization | None, *, rounded: bool) -> NDArray[np.float32]:
    load = equalization.apply(network.arrays.__getitem__) if equalization else network.arrays.__getitem__
    quantized = quantized_params(network.program, network.params, OPTIONS) if rounded else {}
    return ReferenceModel(network.program, load, quantized=quantized).logits(IDS)


@pytest.mark.parametrize("network", [odd_network(), odd_network(alibi=True), odd_network(peculiar=True)])
def test_the_network_computes_the_same(network: Network) -> None:
    network = planted(network, 100.0)
    equalization = found_for(network)
    assert equalization.num_channels >= 3 * 4
    found, wanted = logits(network, equalization, rounded=False), logits(network, None, rounded=False)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_the_bias_of_a_layer_norm_moves_with_its_weight() -> None:
    network = odd_network(plain=True)
    arrays = {name: array.copy() for name, array in network.arrays.items()}
    for name in ("0.mlp_norm", "0.mlp_norm.bias"):
        arrays[name][[3, 17]] *= 100
    arrays["0.up"][:, [3, 17]] /= 100
    network = Network(network.program, arrays)
    found = found_for(network)
    np.testing.assert_array_equal(found.rows["0.mlp_norm"], found.rows["0.mlp_norm.bias"])
    assert (found.rows["0.mlp_norm"][[3, 17]] < 1).all()
    np.testing.assert_allclose(
        logits(network, found, rounded=False), logits(network, None, rounded=False), rtol=0, atol=1e-6
    )


def test_outliers_that_weights_undo_cost_nothing() -> None:
    network = odd_network()
    exact = logits(network, None, rounded=False)

    def error(of: Network, equalization: Equalization | None) -> float:
        return float(np.sqrt(np.square(logits(of, equalization, rounded=True) - exact).mean()))

    large = planted(network, 100.0)
    np.testing.assert_allclose(logits(large, None, rounded=False), exact, atol=1e-4)
    plain, hurt, mended = error(network, None), error(large, None), error(large, found_for(large))
    assert hurt > 2 * plain
    assert mended < 1.3 * plain


def test_what_is_not_for_one_reader_alone_stays() -> None:
    """Norms with an offset, norms of heads, and what is read by a layer that is not quantized."""
    network = odd_network(peculiar=True)  # its norms have an offset
    assert not any("norm" in name for name in found_for(network).rows)
    network = odd_network()
    found = found_for(network)
    layers = {f"{i}.{name}" for i in range(3) for name in ("norm", "mlp_norm")}
    assert {name for name in found.rows if "norm" in name} == {"norm", *layers}
    kept = Network(network.program, network.arrays, kept=frozenset({"1.qkv", "2.down"}))
    changed = {*found_for(kept).rows, *found_for(kept).columns}
    assert not changed & {"1.norm", "1.qkv", "2.gate_up", "2.down"} - {"1.qkv", "2.gate_up"}
    assert set(found_for(kept).columns) == set(found.columns) - {"1.qkv", "2.down"}


def test_sizes_that_were_measured_are_taken_for_those_of_weights() -> None:
    network = odd_network()
    names = quantized_params(network.program, network.params, OPTIONS)
    peaks = {name: np.ones(network.arrays[name].shape[1]) for name in names}
    for name in peaks:
        peaks[name][[5, 6]] = 2.0**10, 2.0**3

    def found_with(least_exponent: int) -> Equalization:
        measured = MeasuredSizes(peaks, least_exponent)
        return equalize(
            network.program, names, network.arrays.__getitem__, lambda name, num_bytes: None, measured=measured
        )

    found = found_with(3)
    assert {name for name in found.columns if found.columns[name][5] >= 8} >= {"0.qkv", "1.gate_up", "2.down", "head"}
    assert all(set(np.delete(found.columns[name], 5)) == {1} for name in ("0.qkv", "1.gate_up", "head"))
    assert found_with(1).num_channels > found.num_channels > found_with(7).num_channels == 0
    np.testing.assert_allclose(logits(network, found, rounded=False), logits(network, None, rounded=False), atol=1e-5)


def test_every_reader_of_a_value_is_multiplied_by_what_its_maker_is_divided_by() -> None:
    network = planted(odd_network(), 100.0)
    found = found_for(network)
    values = found.rows["0.qkv"][80:100].reshape(2, 10)  # 60 queries, 20 keys, 20 values of two heads
    assert (found.rows["0.qkv"][:80] == 1).all()
    np.testing.assert_array_equal(found.rows["0.qkv_bias"], found.rows["0.qkv"])
    np.testing.assert_array_equal(1 / found.columns["0.out"].reshape(2, 3, 10), np.repeat(values[:, None], 3, axis=1))
    np.testing.assert_array_equal(1 / found.columns["0.qkv"], found.rows["0.norm"])
    np.testing.assert_array_equal(1 / found.columns["0.down"], found.rows["0.gate_up"][37:])
    assert "embed" not in {*found.rows, *found.columns}


def test_other_factors_are_another_engine() -> None:
    network = odd_network()
    plain, moved = found_for(network).digests, found_for(planted(network, 100.0)).digests
    assert plain.keys() == moved.keys() >= {"0.norm.rows", "0.qkv.rows", "0.qkv.columns"}
    assert plain["0.norm.rows"] != moved["0.norm.rows"]


def test_powers_of_two() -> None:
    """Of the square root, relative to what most channels have; none for small ones, and for unused channels."""
    factors = powers_of_two(np.array([1.0, 64.0, 4.0, 1.0, 0.0, 1.0]), np.array([1.0, 1.0, 1.0, 32.0, 1.0, 0.0]))
    np.testing.assert_array_equal(np.log2(factors), [0, 2, 0, -3, 0, 0])
    np.testing.assert_array_equal(powers_of_two(np.zeros(3), np.ones(3)), np.ones(3))
    assert np.isfinite(powers_of_two(np.array([1e-300, 1e300]), np.ones(2))).all()
