"""A contestant's loss on a column's texts, and whether it is lower than another's: a paired bootstrap over texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 10_000
CONFIDENCE = 0.95
RESAMPLES_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of one contestant in one column: every measured position, text after text."""

    divergence: NDArray[np.float64]  # [P], nats
    same_best: NDArray[np.bool_]  # [P]
    lengths: NDArray[np.int64]  # positions of each text; P is their sum
    bits_per_weight: float

    @property
    def mean(self) -> float:
        return float(self.divergence.mean())

    @property
    def p99(self) -> float:
        return float(np.quantile(self.divergence, 0.99))

    @property
    def agreement(self) -> float:
        return float(self.same_best.mean())

    @property
    def by_text(self) -> NDArray[np.float64]:
        """The sum over the positions of each text."""
        begins = np.cumsum(self.lengths) - self.lengths
        sums: NDArray[np.float64] = np.add.reduceat(self.divergence, begins)
        return sums

    def numbers(self) -> dict[str, float]:
        """Numbers for the report."""
        return {
            "mean_divergence": self.mean,
            "p99_divergence": self.p99,
            "top1_agreement": self.agreement,
            "bits_per_weight": self.bits_per_weight,
            "positions": len(self.divergence),
            "texts": len(self.lengths),
        }

    def save(self, path: Path) -> None:
        np.savez(
            path,
            divergence=self.divergence,
            same_best=self.same_best,
            lengths=self.lengths,
            bits_per_weight=self.bits_per_weight,
        )

    @classmethod
    def load(cls, path: Path) -> Losses:
        with np.load(path) as arrays:
            bits = float(arrays["bits_per_weight"])
            return cls(arrays["divergence"], arrays["same_best"], arrays["lengths"], bits)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The mean divergence of ours minus theirs, and the interval of its resampled values."""

    difference: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """The verdict on ours."""
        if self.high < 0:
            return "better"
        return "worse" if self.low > 0 else "undecided"

    def numbers(self) -> Mapping[str, Any]:
        return {"difference": self.difference, "low": self.low, "high": self.high, "verdict": self.verdict}


def compare(ours: Losses, theirs: Losses, *, seed: int = 0) -> Comparison:
    """Compares losses on the same texts. Resamples whole texts, because the positions of a text are correlated."""
    if not np.array_equal(ours.lengths, theirs.lengths):
        raise ValueError("these are losses on different texts")
    lengths, sums = ours.lengths.astype(np.float64), ours.by_text - theirs.by_text
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(0, NUM_RESAMPLES, RESAMPLES_AT_ONCE):
        drawn = rng.integers(len(sums), size=(RESAMPLES_AT_ONCE, len(sums)))
        means.append(sums[drawn].sum(axis=1) / lengths[drawn].sum(axis=1))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(means), (tail, 1 - tail))
    return Comparison(float(sums.sum() / lengths.sum()), float(low), float(high))
