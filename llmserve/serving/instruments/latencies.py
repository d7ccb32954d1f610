"""Distributions of a model's latencies, for Prometheus summaries and histograms.

A summary's quantiles are those of the last minute (48 to 60 s). They come from counts in logarithmic buckets, which
cost one dictionary entry per observation and are within 1 % of the value.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence

WINDOW_S = 60.0
NUM_SLOTS = 5  # of the window, which moves by one slot at a time
GROWTH = math.log(1.02)  # between buckets, as a logarithm; a value is at most half of it from its bucket's middle


class Summary:
    """Count and sum of all observations, quantiles of the last `WINDOW_S`."""

    __slots__ = ("_slots", "count", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0
        self._slots: deque[tuple[int, Counter[int]]] = deque(maxlen=NUM_SLOTS)

    def observe(self, value: int) -> None:
        self.count += 1
        self.total += value
        slot = _slot()
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, Counter()))
        self._slots[-1][1][round(math.log(value) / GROWTH) if value > 0 else -1] += 1

    def quantiles(self, wanted: Sequence[float]) -> list[float]:
        """Quantiles of the window; each is NaN if nothing was observed in it."""
        counts: Counter[int] = Counter()
        for slot, slot_counts in self._slots:
            if slot > _slot() - NUM_SLOTS:
                counts.update(slot_counts)
        if not counts:
            return [math.nan] * len(wanted)
        buckets = sorted(counts)
        ranks, total = [], 0
        for bucket in buckets:
            total += counts[bucket]
            ranks.append(total)
        found = [buckets[bisect_left(ranks, max(1, math.ceil(quantile * total)))] for quantile in wanted]
        return [0.0 if bucket < 0 else float(round(math.exp(bucket * GROWTH))) for bucket in found]


def _slot() -> int:
    return int(time.monotonic() / (WINDOW_S / NUM_SLOTS))


class Histogram:
    """Counts of observations up to each bound."""

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(sorted(bounds))
        self.total = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.total += value
        self._counts[bisect_left(self.bounds, value)] += 1

    def cumulative(self) -> list[tuple[float, int]]:
        """Bound and number of observations up to it; the last bound is infinity."""
        pairs, total = [], 0
        for bound, count in zip((*self.bounds, math.inf), self._counts, strict=True):
            total += count
            pairs.append((bound, total))
        return pairs
