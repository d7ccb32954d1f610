"""How many samples detect a loss, computed from the spread of paired differences, before a run and in every report.

The interval of a mean difference is about +- z(0.975) s / sqrt(n), for n samples whose differences have the standard
deviation s. An engine that loses nothing passes a margin m with probability 0.8, and a loss of m shows with that
probability, where

    m = (z(0.975) + z(0.8)) s / sqrt(n) = 2.80 s / sqrt(n)

This m is the minimum detectable effect of n samples; solved for n, it is the number of samples that a margin needs. A
loss of the evidence is known to be x, not 0: then m - x takes the place of m, and s / sqrt(n) follows from the
bootstrap interval's width.

A score must also pass with one more worthless answer, w less than the baseline's. The mean moves by w / n, and
resampling that answer adds w / n to its standard deviation:

    m = w / n + z(0.8) s / sqrt(n) + z(0.975) sqrt(s^2 / n + (w / n)^2)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from llmserve.evaluation.judging.statistics import CONFIDENCE, Interval

POWER = 0.8
Z_INTERVAL = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
Z_POWER = NormalDist().inv_cdf(POWER)


def spread(differences: NDArray[np.float64]) -> float:
    """Standard deviation of one sample's difference; 0 for one sample."""
    return float(differences.std(ddof=1)) if differences.size > 1 else 0.0


def detectable(deviation: float, num_samples: int, *, worst: float = 0.0) -> float:
    """The minimum detectable effect, in units of `deviation`; `worst`: the most that one answer can lose."""
    rare, of_mean = worst / num_samples, deviation / math.sqrt(num_samples)
    return rare + Z_POWER * of_mean + Z_INTERVAL * math.hypot(of_mean, rare)


def detectable_of(interval: Interval) -> float:
    """The same, from a bootstrap interval."""
    return (Z_INTERVAL + Z_POWER) * (interval.high - interval.low) / (2 * Z_INTERVAL)


def deviation_of(interval: Interval, num_samples: int) -> float:
    """The standard deviation of one sample, if the mean of `num_samples` has this bootstrap interval."""
    return (interval.high - interval.low) / (2 * Z_INTERVAL) * math.sqrt(num_samples)


def samples_needed(deviation: float, margin: float, *, worst: float = 0.0) -> int | None:
    """The number that detects a loss of `margin`; None: no number does. `worst`: the most that one answer can lose."""
    if deviation == 0.0 and worst == 0.0:
        return 1
    if margin <= 0:
        return None
    most = 1
    while detectable(deviation, most, worst=worst) > margin:
        most *= 2
    return bisect_left(range(most), -margin, key=lambda count: -detectable(deviation, count, worst=worst), lo=1)


@dataclass(frozen=True, slots=True)
class Flips:
    """For a metric that is right or wrong: samples that only one side has right."""

    lost: int  # by the engine
    gained: int

    @classmethod
    def of(cls, differences: NDArray[np.float64]) -> Flips:
        """Engine minus baseline, sample by sample."""
        return cls(int((differences < 0).sum()), int((differences > 0).sum()))

    @property
    def p_value(self) -> float:
        """McNemar's exact test: the probability of a split at least this uneven if both sides are equally good."""
        total, fewer = self.lost + self.gained, min(self.lost, self.gained)
        tail = sum(math.comb(total, k) for k in range(fewer + 1))
        return min(1.0, float(2 * tail / 2**total))
