"""Converts and checks two-byte floats with integer operations: numpy would process them one at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80}  # all of these bits are set in infinities and NaN
SIGN_AND_MAGNITUDE = np.int32(-0x7000_2000)  # bits of a float16 after its sign was extended and it was shifted up by 13
EXPONENT_DIFFERENCE = np.float32(2.0**112)  # between the two formats; multiplying by it is exact, even for subnormals


def is_finite(array: NDArray[Any]) -> bool:
    exponent = EXPONENTS.get(array.dtype.name)
    if exponent is None:
        return bool(np.isfinite(array).all())
    return bool(np.bitwise_and(array.view(np.uint16), np.uint16(exponent)).max(initial=0) < exponent)


def to_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """Copy to float32. All numbers of a float16 array must be finite."""
    if array.dtype != np.float16:
        return array.astype(np.float32)
    bits = array.view(np.int16).astype(np.int32)
    bits <<= 13
    bits &= SIGN_AND_MAGNITUDE
    floats = bits.view(np.float32)
    floats *= EXPONENT_DIFFERENCE
    return floats
