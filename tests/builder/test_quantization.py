"""How numbers are rounded to few bits."""

from __future__ import annotations

import numpy as np
import pytest

from llmserve.builder import int4_search
from llmserve.builder.options import BuildOptions
from llmserve.builder.quantization import (
    Int4,
    Int8,
    Matrix,
    WeightPart,
    in_groups,
    mix_heads,
    mixed_blocks,
    quantized_params,
    round_in_groups,
    round_to_steps,
    round_weight,
)
from llmserve.models.graph import CacheShape, Graph, Program
from llmserve.models.number_formats import INT4, INT8, INT8_ACTIVATIONS
from llmserve.models.registry import architecture_for
from llmserve.models.spec import Param
from tests.checkpoints import KINDS


def test_values_and_scales() -> None:
    rows = np.zeros((3, 40), np.float32)
    rows[1, [0, 1, 39]] = 1.27, -0.635, 0.0127
    rows[2, [0, 39]] = -2.54, 0.0127
    found = Int8().quantize(rows)
    assert (found.values.shape, found.scales.shape) == ((3, 40), (3, 2))
    np.testing.assert_array_equal(found.values[1, [0, 1, 39]], [127, -64, 127])
    np.testing.assert_array_equal(found.values[2, [0, 39]], [-127, 127])
    np.testing.assert_allclose(found.row_scale, [0.0, 0.01, 0.02], rtol=1e-6)
    np.testing.assert_allclose(found.group_scales, np.array([[0, 0], [1, 0.01], [1, 0.005]]), rtol=1e-3)


def test_four_bits_have_zero_points() -> None:
    rows = np.zeros((3, 40), np.float32)
    rows[1, [0, 1, 39]] = 1.27, -0.635, 0.0127
    rows[2, [0, 39]] = -2.54, 0.0127
    found = Int4().quantize(rows)
    assert found.zeros is not None
    np.testing.assert_array_equal(found.values[1:, [0, 1, 2, 39]], [[15, 0, 5, 15], [0, 15, 15, 15]])
    np.testing.assert_array_equal(found.zeros[1:], [[5 * 16, 0], [15 * 16, 0]])
    np.testing.assert_array_equal(found.scales[1:, 0], [255, 255])
    np.testing.assert_allclose(found.row_scale * 255**2, [0, 1.905 / 15, 2.54 / 15], rtol=1e-6)
    np.testing.assert_allclose(found.weight[1:], rows[1:], atol=0.0004)
    assert not found.weight[0].any()


def test_four_bits_refine_scales_and_zero_points(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(2).standard_normal((50, 320)).astype(np.float32)

    def errors(refinements: int) -> Matrix:
        monkeypatch.setattr(int4_search, "REFINEMENTS", refinements)
        squares: Matrix = in_groups((Int4().quantize(rows).weight - rows) ** 2, INT4).sum(axis=2)
        return squares

    plain, refined = errors(0), errors(3)
    assert (refined <= plain * 1.0001).all()
    assert refined.mean() < 0.9 * plain.mean()


def test_four_bits_keep_numbers_that_have_four_bits() -> None:
    rng = np.random.default_rng(5)
    values = rng.integers(0, 16, (40, 10, 32)).astype(np.float32)
    values[:, :, :2] = 0, 15
    scales, zeros = rng.uniform(0.3, 1, (40, 10, 1)), rng.uniform(0, 15, (40, 10, 1))
    rows = ((values - zeros) * scales).astype(np.float32).reshape(40, 320)
    error = np.abs(Int4().quantize(rows).weight - rows)
    assert in_groups(error / np.repeat(scales[:, :, 0], 32, axis=1).astype(np.float32), INT4).max() < 0.15  # of a step


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_four_bits_of_groups_of_any_size(size: float) -> None:
    rows = np.random.default_rng(3).standard_normal((100, 96)).astype(np.float32) * np.float32(size)
    rows[:, 32:64] /= 300
    rows[5] = 0
    error = in_groups(np.abs(round_weight([WeightPart(Int4(), 0, 100)], rows, slice(0, 100)) - rows), INT4)
    largest = np.ptp(in_groups(rows, INT4), axis=2, keepdims=True)
    assert (error <= 0.15 * largest).all()  # a quarter of the range is cut off at most, from both sides
    assert (error.mean(axis=2) <= 0.03 * largest[:, :, 0]).all()


def test_parts_of_a_weight_are_rounded_each_in_its_own_way() -> None:
    rows = np.random.default_rng(4).standard_normal((700, 40)).astype(np.float32)
    parts = [WeightPart(Int4(), 0, 300), WeightPart(Int8(), 300, 340), WeightPart(Int4(), 340, 700)]
    whole = round_weight(parts, rows, slice(0, 700))
    for part in parts:
        place = slice(part.begin, part.end)
        np.testing.assert_array_equal(whole[place], part.scheme.quantize(rows[place]).weight)
    np.testing.assert_array_equal(round_weight(parts, rows, slice(310, 360)), whole[310:360])


def layers(*, kv_heads: int = 8, num_layers: int = 4) -> tuple[Program, list[Param]]:
    """Layers of a network with eight heads of 64: queries, keys and values in one matrix, and no gate."""
    width, kv_width = 512, 64 * kv_heads
    shapes = {"embed": (64, width), "head": (64, width)}
    g = Graph(CacheShape(num_layers, kv_heads, 64), 64)
    x = g.embed("embed", width)
    for i in range(num_layers):
        qkv = g.linear(x, f"{i}.qkv", width + 2 * kv_width)
        parts = g.slice(qkv, 0, width), g.slice(qkv, width, kv_width), g.slice(qkv, width + kv_width, kv_width)
        attended = g.attention(*parts, layer=i, num_heads=8, num_kv_heads=kv_heads, head_dim=64, scale=0.1)
        x = g.linear(g.linear(g.add(x, g.linear(attended, f"{i}.o", width)), f"{i}.up", 2048), f"{i}.down", width)
        shapes |= {f"{i}.qkv": (width + 2 * kv_width, width), f"{i}.o": (width, width)}
        shapes |= {f"{i}.up": (2048, width), f"{i}.down": (width, 2048)}
    g.logits(g.select_rows(x), "head")
    params = [Param(name, shape, (name,), (shape,), quantizable=name != "embed") for name, shape in shapes.items()]
    return g.program(), params


def test_values_have_eight_bits_and_then_what_reads_attention_as_long_as_there_is_room() -> None:
    int4, int8 = Int4(), Int8()
    for kv_heads in (8, 1):
        program, params = layers(kv_heads=kv_heads)
        found = quantized_params(program, params, BuildOptions(quantization="int4"))
        shapes = {param.name: param.shape for param in params if param.name not in ("embed", "head")}
        bits = sum(
            (part.end - part.begin) * (part.scheme.format.bits_with_scales * shape[1] + 32)
            for name, shape in shapes.items()
            for part in found[name]
        )
        assert 4.7 < bits / sum(rows * cols for rows, cols in shapes.values()) <= 4.9
        first = 512 + 64 * kv_heads
        assert found["0.qkv"] == (WeightPart(int4, 0, first), WeightPart(int8, first, first + 64 * kv_heads))
        assert found["0.up"] == (WeightPart(int4, 0, 2048),)
        assert found["head"] == (WeightPart(int8, 0, 64),)
        assert found["0.o"] == (WeightPart(int8 if kv_heads == 1 else int4, 0, 512),)
    assert found["3.o"] == (WeightPart(int4, 0, 512),)
    assert all(found[name][0].scheme == int8 for name in ("1.o", "2.o"))


def test_a_latent_has_eight_bits() -> None:
    """Its rows make values and keys."""
    config = KINDS["deepseek-v2-moe"] | {"hidden_size": 512, "kv_lora_rank": 64, "moe_intermediate_size": 256}
    architecture = architecture_for(config)
    spec = architecture.from_hf(config)
    found = quantized_params(architecture.program(spec), architecture.params(spec), BuildOptions(quantization="int4"))
    rows = (WeightPart(Int4(), 0, 64), WeightPart(Int8(), 64, 64 + 8 + 64))
    assert all(found[f"layers.{layer}.attn.kv"] == rows for layer in range(spec.num_layers))


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_weights_keep_the_largest_of_each_group(size: float) -> None:
    """Whatever the size of a row: float16 holds a group's scale relative to its row's largest."""
    rows = np.random.default_rng(0).standard_normal((100, 100)).astype(np.float32) * np.float32(size)
    rows[2, :32] = 0
    rounded = round_weight([WeightPart(Int8(), 0, 100)], rows, slice(0, 100))
    error, groups = in_groups(np.abs(rounded - rows), INT8), in_groups(rows, INT8)
    steps = np.abs(groups).max(axis=2, keepdims=True) / 127
    assert (error <= 0.56 * steps).all()
    assert np.median(error[steps[:, :, 0] > 0] / steps[steps[:, :, 0] > 0][:, None]) < 0.3
    assert not rounded[2, :32].any()
    largest = np.abs(groups).argmax(axis=2)[:, :, None]
    kept = np.take_along_axis(in_groups(rounded, INT8), largest, axis=2)
    np.testing.assert_allclose(kept, np.take_along_axis(groups, largest, axis=2), rtol=1e-3)


def test_activations_have_a_scale_for_each_group() -> None:
    x = np.random.default_rng(1).standard_normal((5, 70)).astype(np.float32)
    x[:, 40] = 1e4
    rounded = round_in_groups(x, INT8_ACTIVATIONS)
    assert rounded.shape == x.shape
    np.testing.assert_array_equal(rounded[:, :32], round_to_steps(x[:, :32], 127))
    near = np.r_[0:32, 64:70]  # the outlier's neighbours are what is lost
    assert np.abs(rounded - x)[:, near].max() < np.abs(x[:, near]).max() / 127 * 0.501
    assert not rounded[:, 41:64].any()


@pytest.mark.parametrize("head_dim", [1, 2, 10, 64, 80, 96, 128])
def test_mixed_heads_have_the_same_product_and_no_large_dimension(head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    queries, keys = rng.integers(-9, 10, (2, 5, head_dim)).astype(np.float32)
    blocks = mixed_blocks(head_dim)
    assert sum(blocks) == head_dim
    factors = np.repeat(np.float32(1) / np.array(blocks, np.float32), blocks)
    np.testing.assert_array_equal((mix_heads(queries) * factors) @ mix_heads(keys).T, queries @ keys.T)
    one = np.zeros((1, head_dim), np.float32)
    one[0, 0] = 3
    np.testing.assert_array_equal(np.abs(mix_heads(one))[0], [3] * blocks[0] + [0] * (head_dim - blocks[0]))
