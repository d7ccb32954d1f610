"""What is done to two-byte floats by their bits, beside numpy's own, for every one of them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llmserve.checkpoint.floats import is_finite, to_float32

ALL_BITS = np.arange(2**16, dtype=np.uint16)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_finite_number_becomes_the_same_float(dtype: Any) -> None:
    with np.errstate(invalid="ignore"):
        numbers = ALL_BITS.view(dtype)
        numbers = numbers[np.isfinite(numbers)]
    found = to_float32(numbers)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), numbers.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_what_is_not_finite_is_found(dtype: Any) -> None:
    with np.errstate(invalid="ignore"):
        known = np.isfinite(ALL_BITS.view(dtype))
    one = np.array(1, dtype).view(np.uint16)
    for bits in range(0, 2**16, 31):
        assert is_finite(np.array([one, bits, one], np.uint16).view(dtype)) == known[bits]
    assert is_finite(np.empty(0, dtype))


def test_other_floats_are_numpys() -> None:
    assert not is_finite(np.array([1.0, np.inf]))
    assert is_finite(np.array([1.0, 2.0], np.float32))
    np.testing.assert_array_equal(to_float32(np.array([0.1, 3.0])), np.array([0.1, 3.0], np.float32))
