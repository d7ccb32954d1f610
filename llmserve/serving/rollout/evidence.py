"""Tests whether a candidate is significantly worse, from its requests so far. Plain arithmetic.

The tests are repeated after every request, so tests made for one look would raise false alarms sooner or later.
`RateTest` may be repeated any number of times: it computes a likelihood ratio, averaged over several alternatives. This
ratio exceeds 1 / alpha in at most alpha of all runs whose rate is within the bound (Ville's inequality).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from statistics import median

ALPHA = 0.01  # the largest fraction of just acceptable candidates that each test rolls back
EXCESSES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 0.95)  # alternatives: the rate's place between the bound (0) and 1
FEWEST_SAMPLES = 20  # of each version, before latencies are compared


class RateTest:
    """Tests whether something happens in more than a fraction `bound` of all cases."""

    def __init__(self, bound: float, alpha: float = ALPHA) -> None:
        self.bound = bound
        self.num_bad = 0
        self.num_all = 0
        self._alpha = alpha
        self._exceeded = False

    def add(self, *, bad: bool) -> None:
        self.num_all += 1
        self.num_bad += bad
        self._exceeded = self._exceeded or self._exceeds()

    @property
    def rate(self) -> float:
        return self.num_bad / self.num_all if self.num_all else 0.0

    @property
    def is_exceeded(self) -> bool:
        """Whether the bound is significantly exceeded. Once true, it stays true."""
        return self._exceeded

    def _exceeds(self) -> bool:
        if self.bound == 0.0:
            return self.num_bad > 0
        if self.bound == 1.0 or not self.num_bad:
            return False
        num_good = self.num_all - self.num_bad
        logs = [
            self.num_bad * math.log((self.bound + (1 - self.bound) * excess) / self.bound)
            + num_good * math.log(1 - excess)
            for excess in EXCESSES
        ]
        top = max(logs)
        mean = top + math.log(sum(math.exp(value - top) for value in logs) / len(logs))
        return mean >= -math.log(self._alpha)


def median_interval(values: Sequence[float], alpha: float) -> tuple[float, float]:
    """A confidence interval for the median of any distribution, from its samples, with error probability `alpha`.

    Its ends are two of the values: the number of values below the median is binomial. Infinite if there are too few.
    """
    count = len(values)
    below = accumulate(math.comb(count, number) for number in range(count // 2))  # out of 2^count
    rank = sum(1 for number in below if number <= alpha / 2 * 2**count)
    if not rank:
        return -math.inf, math.inf
    ordered = sorted(values)
    return ordered[rank - 1], ordered[count - rank]


def median_ratio(values: Sequence[float], others: Sequence[float]) -> float | None:
    """The median of `values` divided by that of `others`; None: there is nothing to compare."""
    if not values or not others or not (base := median(others)):
        return None
    return median(values) / base


class RatioTest:
    """Tests whether the median of one kind of sample is more than `bound` times that of the other.

    It looks when there are 20, 40, 80, ... samples of the first kind. Each look may err half as often as the previous
    one.
    """

    def __init__(self, bound: float, alpha: float = ALPHA) -> None:
        self._bound = bound
        self._alpha = alpha / 2
        self._next_look = FEWEST_SAMPLES
        self.is_exceeded = False

    def look(self, num_samples: int, values: Sequence[float], others: Sequence[float]) -> None:
        """`values`, `others`: the latest samples of each kind; `num_samples`: of the first kind in total."""
        if num_samples < self._next_look or len(others) < FEWEST_SAMPLES:
            return
        self._next_look *= 2
        low, _ = median_interval(values, self._alpha)
        _, high = median_interval(others, self._alpha)
        self._alpha /= 2
        self.is_exceeded = self.is_exceeded or low > self._bound * high
