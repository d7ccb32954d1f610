"""Several measurements of the same value, summarized."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))

    def text(self, scale: float = 1.0, digits: int = 0) -> str:
        """`median (low-high)`, each divided by `scale`."""
        median, low, high = (f"{value / scale:,.{digits}f}" for value in (self.median, self.low, self.high))
        return median if self.count == 1 else f"{median} ({low}-{high})"


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value at `fraction` of the sorted ones; always a measured one."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]
