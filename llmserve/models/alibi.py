"""ALiBi: attention with linear biases (Press et al., 2021)."""

from __future__ import annotations

import math


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """One slope per head, by the paper's rule.

    For a power of two n, the slopes are a geometric sequence starting at 2^(-8/n) with that ratio. Otherwise, they are
    the sequence of the next lower power of two, followed by every second slope of the next higher one.
    """
    lower = 1 << int(math.log2(num_heads))
    slopes = _geometric(lower)
    if lower != num_heads:
        slopes += _geometric(2 * lower)[0::2][: num_heads - lower]
    return tuple(slopes)


def _geometric(num_heads: int) -> list[float]:
    ratio = 2.0 ** (-8.0 / num_heads)
    return [ratio**i for i in range(1, num_heads + 1)]
