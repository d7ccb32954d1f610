"""How numbers are rounded to few bits."""

from __future__ import annotations

import numpy as np
import pytest

from llmserve.builder.quantization import (
    QUANTIZED_GROUP,
    Int4,
    Int8,
    Scheme,
    in_groups,
    round_activations,
    round_to_int8,
    round_weight,
)

SCHEMES = (Int8(), Int4())


def test_values_and_scales() -> None:
    rows = np.zeros((3, 40), np.float32)
    rows[1, [0, 1, 39]] = 1.27, -0.635, 0.0127
    rows[2, [0, 39]] = -2.54, 0.0127
    found = Int8().quantize(rows)
    assert (found.values.shape, found.group_scale.shape) == ((3, 40), (3, 2))
    np.testing.assert_array_equal(found.values[1, [0, 1, 39]], [127, -64, 127])
    np.testing.assert_array_equal(found.values[2, [0, 39]], [-127, 127])
    np.testing.assert_allclose(found.row_scale, [0.0, 0.01, 0.02], rtol=1e-6)
    np.testing.assert_allclose(found.group_scale.astype(float), np.array([[0, 0], [1, 0.01], [1, 0.005]]), rtol=1e-3)
    found = Int4().quantize(rows)
    wanted = np.array([[0, 0, 0], [-8, 4, -8], [-8, 0, -8]])
    np.testing.assert_array_equal(found.values[:, [0, 1, 39]], wanted)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_weights_keep_the_largest_of_each_group(scheme: Scheme, size: float) -> None:
    """Whatever the size of a row: float16 holds a group's scale relative to its row's largest."""
    rows = np.random.default_rng(0).standard_normal((600, 100)).astype(np.float32) * np.float32(size)
    rows[2, :32] = 0
    rounded = round_weight(scheme, rows)
    error, groups = in_groups(np.abs(rounded - rows)), in_groups(rows)
    steps = np.abs(groups).max(axis=2, keepdims=True) / (127 if scheme.name == "int8" else 8)
    assert (error <= (0.56 if scheme.name == "int8" else 1.01) * steps).all()  # int4 has no eighth step up
    assert np.median(error[steps[:, :, 0] > 0] / steps[steps[:, :, 0] > 0][:, None]) < 0.3
    assert not rounded[2, :32].any()
    largest = np.abs(groups).argmax(axis=2)[:, :, None]
    kept = np.take_along_axis(in_groups(rounded), largest, axis=2)
    np.testing.assert_allclose(kept, np.take_along_axis(groups, largest, axis=2), rtol=1e-3)


def test_activations_have_a_scale_for_each_group() -> None:
    x = np.random.default_rng(1).standard_normal((5, 70)).astype(np.float32)
    x[:, 40] = 1e4
    rounded = round_activations(x)
    assert rounded.shape == x.shape
    np.testing.assert_array_equal(rounded[:, :QUANTIZED_GROUP], round_to_int8(x[:, :QUANTIZED_GROUP]))
    near = np.r_[0:32, 64:70]  # the outlier's neighbours are what is lost
    assert np.abs(rounded - x)[:, near].max() < np.abs(x[:, near]).max() / 127 * 0.501
    assert not rounded[:, 41:64].any()
