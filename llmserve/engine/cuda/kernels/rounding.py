"""Numbers to integers with a scale, as the CPU engine and the builder round them."""

from __future__ import annotations

import triton
import triton.language as tl

NOTHING: tl.constexpr = tl.constexpr(2.0**-100)  # numbers below have no inverse to multiply with
HALF_EVEN: tl.constexpr = tl.constexpr(1.5 * 2.0**23)  # added and taken away: the nearest integer, the even one of two


@triton.jit
def rounded(values, peak, STEPS: tl.constexpr):
    """Integers, still as floats, and scales: the peak of the last axis becomes STEPS; what has none becomes zeros."""
    inverse = tl.where(peak > NOTHING, tl.div_rn(STEPS, peak), 0.0)
    steps = (values * tl.expand_dims(inverse, len(values.shape) - 1) + HALF_EVEN) - HALF_EVEN
    return steps, tl.div_rn(peak, STEPS)
