"""Is a difference real? Paired resampling over samples, and the agreement of two token sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 10_000
CHUNK = 500  # resamples drawn at a time, to limit memory
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
    if np.all(differences == differences[0]):  # without variance, the mean must be exact
        value = float(differences[0])
        return Interval(value, value, value)
    return _interval(
        float(differences.mean()), differences.size, lambda drawn: differences[drawn].mean(1), seed, resamples
    )


def resampled_means(
    values: NDArray[np.float64], lengths: NDArray[np.int64], *, seed: int = 0, resamples: int = NUM_RESAMPLES
) -> Interval:
    """The mean of `values` [P] over all positions, with its 95 % interval from resampled whole samples, which have
    `lengths` positions [N]."""
    sums = _sums(values, lengths)

    def means(drawn: NDArray[np.int64]) -> NDArray[np.float64]:
        weights = lengths[drawn].sum(axis=1)
        found: NDArray[np.float64] = np.divide(
            sums[drawn].sum(axis=1), weights, out=np.zeros(len(drawn)), where=weights > 0
        )
        return found

    return _interval(float(values.mean()) if values.size else 0.0, len(lengths), means, seed, resamples)


def resampled_quantiles(
    values: NDArray[np.float64],
    lengths: NDArray[np.int64],
    quantile: float,
    *,
    seed: int = 0,
    resamples: int = NUM_RESAMPLES,
) -> Interval:
    """Like `resampled_means`, for a quantile: the smallest value that this share of all positions does not exceed."""
    assert 0 < quantile <= 1
    order = np.argsort(values, kind="stable")[::-1]
    ordered = values[order]
    sample_of = np.repeat(np.arange(len(lengths)), lengths)[order]

    def quantiles(drawn: NDArray[np.int64]) -> NDArray[np.float64]:
        num_drawn, num_samples = drawn.shape
        places = drawn + num_samples * np.arange(num_drawn)[:, None]
        counts = np.bincount(places.ravel(), minlength=drawn.size).reshape(drawn.shape)
        totals = counts @ lengths
        num_above = totals - np.ceil(quantile * totals).astype(np.int64)  # positions that may be larger
        found = np.zeros(num_drawn)
        rows = np.flatnonzero(totals)
        num_looked_at = 256  # a high quantile is among the first
        while rows.size:
            seen = np.cumsum(counts[rows][:, sample_of[:num_looked_at]], axis=1)
            is_met = seen > num_above[rows, None]
            has_met = is_met[:, -1]
            found[rows[has_met]] = ordered[is_met[has_met].argmax(axis=1)]
            rows, num_looked_at = rows[~has_met], 4 * num_looked_at
        return found

    value = float(quantiles(np.arange(len(lengths))[None])[0])
    return _interval(value, len(lengths), quantiles, seed, resamples)


def _sums(values: NDArray[np.float64], lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Sums over each sample's positions; 0 for a sample without any."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.cumsum(lengths)
    sums: NDArray[np.float64] = total[ends] - total[ends - lengths]
    return sums


def _interval(
    value: float,
    num_samples: int,
    statistic: Callable[[NDArray[np.int64]], NDArray[np.float64]],
    seed: int,
    resamples: int,
) -> Interval:
    """`statistic`: maps indexes of drawn samples [R, N] to a number for each resample [R]."""
    assert num_samples > 0, "an empty suite has no mean"
    generator = np.random.default_rng(seed)
    found = np.concatenate(
        [
            statistic(generator.integers(num_samples, size=(min(CHUNK, resamples - done), num_samples)))
            for done in range(0, resamples, CHUNK)
        ]
    )
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(found, (tail, 1 - tail))
    return Interval(value, min(float(low), value), max(float(high), value))


def first_divergence(expected: Sequence[object], actual: Sequence[object]) -> int | None:
    """Position of the first item that differs; a sequence that ends early differs at its end. None: equal."""
    for position, (a, b) in enumerate(zip(expected, actual, strict=False)):
        if a != b:
            return position
    return None if len(expected) == len(actual) else min(len(expected), len(actual))
