"""Rounding with feedback, beside GPTQ written down plainly."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from llmserve.builder.calibration.feedback import (
    BLOCK_INPUTS,
    DAMPING,
    SHARE_BITS,
    Moments,
    WithFeedback,
    shares_of,
    with_feedback,
)
from llmserve.builder.quantization import GridScheme, Int4, Int8, Matrix, WeightPart, round_weight
from llmserve.models.number_formats import INT4, INT8

SCHEMES: tuple[GridScheme, ...] = (Int4(), Int8())


def correlated(num_inputs: int, count: int = 2000, seed: int = 0) -> Matrix:
    """Every input is a mixture of a few things, whatever the seed."""
    mixing = np.random.default_rng(11).standard_normal((max(4, num_inputs // 4), num_inputs))
    rng = np.random.default_rng(seed)
    own = rng.standard_normal((count, num_inputs))
    return (rng.standard_normal((count, len(mixing))) @ mixing + own).astype(np.float32)


def weight(rows: int, num_inputs: int) -> Matrix:
    drawn: Matrix = np.random.default_rng(1).standard_normal((rows, num_inputs)).astype(np.float32)
    return drawn / np.float32(num_inputs**0.5)


def moments_of(x: Matrix) -> Moments:
    """Of blocks of BLOCK_INPUTS, the last one filled up with zeros."""
    width = min(BLOCK_INPUTS, -(-x.shape[1] // 32) * 32)
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, -x.shape[1] % width)))
    blocks = padded.reshape(len(x), -1, width).transpose(1, 0, 2)
    products: Moments = (blocks.transpose(0, 2, 1) @ blocks).astype(np.float32)
    return products


def plain_gptq(rows: Matrix, scheme: GridScheme, x: Matrix) -> NDArray[np.float64]:
    """One block, input by input, in float64: what a group's later inputs become is known when its grid is chosen."""
    products = x.T.astype(np.float64) @ x
    products += np.eye(len(products)) * DAMPING * np.trace(products) / len(products)
    upper = np.linalg.cholesky(np.linalg.inv(products)).T
    left, made = rows.astype(np.float64), np.empty(rows.shape)
    for begin in range(0, rows.shape[1], 32):
        group = np.ascontiguousarray(left[:, begin : begin + 32].T.astype(np.float32))
        grid = scheme.grid(group, scheme.row_scale(rows))
        for i in range(begin, begin + 32):
            step = np.where(grid.step > 0, grid.step, 1)
            values = np.clip(np.rint(left[:, i] / step + grid.zero), grid.least, grid.most)
            made[:, i] = (values - grid.zero) * grid.step
            left[:, i + 1 :] -= np.outer((left[:, i] - made[:, i]) / upper[i, i], upper[i, i + 1 :])
    return made


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: str(scheme.format.name))
def test_it_is_gptq(scheme: GridScheme) -> None:
    x, rows = correlated(128), weight(30, 128)
    found = WithFeedback(scheme, shares_of(moments_of(x))).quantize(rows).weight
    wanted = plain_gptq(rows, scheme, x)
    same = np.isclose(found, wanted, rtol=1e-5, atol=1e-7)
    assert same.mean() > 0.99  # the last bit of a float tips a few, and what follows them


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: str(scheme.format.name))
@pytest.mark.parametrize("num_inputs", [20, 64, 300, 688])
def test_products_are_nearer_than_with_each_number_rounded_for_itself(scheme: GridScheme, num_inputs: int) -> None:
    x, rows = correlated(num_inputs), weight(40, num_inputs)
    unseen = correlated(num_inputs, seed=7)
    shares = shares_of(moments_of(x))

    def error(of: Matrix) -> float:
        return float(np.square(unseen @ (of - rows).T).mean())

    plain, found = scheme.quantize(rows), WithFeedback(scheme, shares).quantize(rows)
    assert error(found.weight) < 0.85 * error(plain.weight)
    assert (found.values.dtype, found.scales.dtype) == (plain.values.dtype, plain.scales.dtype)
    assert (found.values.shape, found.scales.shape) == (plain.values.shape, plain.scales.shape)
    assert (found.zeros is None) == (plain.zeros is None)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: str(scheme.format.name))
def test_a_row_depends_on_no_other(scheme: GridScheme) -> None:
    """So pieces, threads and machines change nothing once the moments are known."""
    rows = weight(70, 300) * np.logspace(-12, 12, 70, dtype=np.float32)[:, None]
    rows[3] = 0
    shares = shares_of(moments_of(correlated(300)))
    parts = with_feedback({"a": [WeightPart(scheme, 0, 70)]}, {"a": shares})["a"]
    whole = round_weight(parts, rows, slice(0, 70))
    for begin, end in ((0, 1), (1, 4), (4, 70)):
        np.testing.assert_array_equal(round_weight(parts, rows, slice(begin, end)), whole[begin:end])
    assert not whole[3].any()
    assert np.isfinite(whole).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: str(scheme.format.name))
def test_inputs_that_have_nothing_to_do_with_each_other_share_nothing(scheme: GridScheme) -> None:
    rows = weight(10, 96)
    independent = np.diag(np.r_[np.zeros(40), np.full(56, 9.0)])[None]  # some are never anything
    shares = shares_of(independent)
    assert not shares.any()
    plain, found = scheme.quantize(rows), WithFeedback(scheme, shares).quantize(rows)
    np.testing.assert_array_equal(found.values, plain.values)
    np.testing.assert_array_equal(found.scales, plain.scales)


def test_weights_of_which_nothing_is_known_keep_their_format() -> None:
    parts = {"a": [WeightPart(Int4(), 0, 3), WeightPart(Int8(), 3, 9)], "b": [WeightPart(Int8(), 0, 9)]}
    found = with_feedback(parts, {"a": shares_of(moments_of(correlated(64)))})
    assert found["b"] == parts["b"]
    assert [(part.scheme.format, part.begin, part.end) for part in found["a"]] == [(INT4, 0, 3), (INT8, 3, 9)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: str(scheme.format.name))
def test_each_expert_is_rounded_for_what_it_reads(scheme: GridScheme) -> None:
    """Whatever rows are rounded together."""
    rows, height = weight(90, 64), 30
    shares = np.stack([shares_of(moments_of(correlated(64, seed=seed))) for seed in range(3)])
    shares[1] = 0
    half = shares.astype(np.float16)
    np.testing.assert_array_equal(half.astype(np.float64) * 2.0**SHARE_BITS % 1, 0)  # sums stay exact
    parts = with_feedback({"a": [WeightPart(scheme, 0, 90)]}, {"a": half})["a"]
    assert [(part.scheme.format, part.begin, part.end) for part in parts] == [(scheme.format, 0, 90)]
    whole = round_weight(parts, rows, slice(0, 90))
    for expert, of_expert in enumerate(half):
        own = slice(expert * height, (expert + 1) * height)
        np.testing.assert_array_equal(whole[own], WithFeedback(scheme, of_expert).quantize(rows[own]).weight)
    for begin, end in ((0, 31), (7, 8), (29, 90), (60, 61), (30, 60)):
        np.testing.assert_array_equal(round_weight(parts, rows, slice(begin, end)), whole[begin:end])
