"""Is a difference real? Paired resampling over samples, and how far two token sequences agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 10_000
CHUNK = 500  # resamples drawn at once, to bound memory
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its bootstrap confidence interval."""

    mean: float
    low: float
    high: float


def paired_bootstrap(differences: NDArray[np.float64], *, seed: int = 0, resamples: int = NUM_RESAMPLES) -> Interval:
    """The 95 % percentile interval of the mean of per-sample differences [N]; repeatable for one seed."""
    assert differences.size > 0, "an empty suite has no mean"
    if np.all(differences == differences[0]):  # nothing varies; the mean must not be off by a rounding
        value = float(differences[0])
        return Interval(value, value, value)
    generator = np.random.default_rng(seed)
    means = np.concatenate(
        [
            differences[
                generator.integers(differences.size, size=(min(CHUNK, resamples - done), differences.size))
            ].mean(1)
            for done in range(0, resamples, CHUNK)
        ]
    )
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, (tail, 1 - tail))
    return Interval(float(differences.mean()), float(low), float(high))


def first_divergence(expected: Sequence[int], actual: Sequence[int]) -> int | None:
    """Position of the first token that differs; a sequence that ends early differs where it ends. None: equal."""
    for position, (a, b) in enumerate(zip(expected, actual, strict=False)):
        if a != b:
            return position
    return None if len(expected) == len(actual) else min(len(expected), len(actual))
