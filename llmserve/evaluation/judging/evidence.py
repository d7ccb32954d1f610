"""Results of teacher forcing: the engine's distributions at every position of the baseline's answers.

    kl          mean Kullback-Leibler divergence from the baseline, in nats per position
    kl_p99      its 99th percentile over positions
    top1        positions whose likeliest token is another one, in percent
    perplexity  how much larger the engine's perplexity of the baseline's answers is, in percent
    flip        largest margin, in nats, between the baseline's two best tokens where the engine's best is another one

Each is a loss: 0 for an equal engine. All except `flip`, a maximum, have a 95 % interval from resampled whole samples,
because positions of a sample are correlated. In 16 bits, candidates that are closer than about 0.1 nat may swap; a much
larger flip is a bug, or quantization.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from llmserve.evaluation.decisions import Decision, divergence
from llmserve.evaluation.judging.statistics import Interval, resampled_means, resampled_quantiles

Floats = NDArray[np.float64]
PERCENTILE = 0.99
WORST = 100.0  # nats: represents a number that is not finite


class Loss(Enum):
    KL = "kl"
    KL_P99 = "kl_p99"
    TOP1 = "top1"
    PERPLEXITY = "perplexity"
    FLIP = "flip"


LOSSES = tuple(loss.value for loss in Loss)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Data for every position, sample after sample."""

    divergence: Floats  # [P], nats
    other_best: Floats  # [P], 1 if the likeliest token is different
    margins: Floats  # [P], nats between the baseline's two likeliest
    surprise: Floats  # [P], nats between the baseline's two likeliest tokens
    lengths: NDArray[np.int64]  # [P], nats by which the engine finds the baseline's token less likely
    num_broken: int = 0  # number of positions of each sample; their sum is P

    @classmethod
    def of(cls, expected: Sequence[Sequence[Decision]], actual: Sequence[Sequence[Decision]]) -> Evidence:
        """Both sides' decisions on the same tokens, sample by sample. The engine may have fewer, if a sample's last
        ones did not fit."""
        pairs = [list(zip(one, other, strict=False)) for one, other in zip(expected, actual, strict=True)]
        flat = [pair for sample in pairs for pair in sample]
        divergences = np.array([divergence(one, other) for one, other in flat])
        surprise = np.array([one.log_prob - other.log_prob for one, other in flat])
        is_broken = ~(np.isfinite(divergences) & np.isfinite(surprise))
        return cls(
            np.where(is_broken, WORST, divergences),
            np.array([float(one.top.ids[0] != other.top.ids[0]) for one, other in flat]),
            np.array([one.margin for one, _ in flat]),
            np.where(is_broken, WORST, surprise),
            np.array([len(sample) for sample in pairs]),
            int(is_broken.sum()),
        )

    @property
    def num_positions(self) -> int:
        return len(self.divergence)

    def interval(self, loss: Loss, *, seed: int = 0) -> Interval:
        """A number over all positions; for `flip`, the interval has no width."""
        if loss is Loss.KL:
            return resampled_means(self.divergence, self.lengths, seed=seed)
        if loss is Loss.KL_P99:
            return resampled_quantiles(self.divergence, self.lengths, PERCENTILE, seed=seed)
        if loss is Loss.TOP1:
            return resampled_means(100 * self.other_best, self.lengths, seed=seed)
        if loss is Loss.FLIP:
            largest = float((self.margins * self.other_best).max(initial=0.0))
            return Interval(largest, largest, largest)
        mean = resampled_means(self.surprise, self.lengths, seed=seed)
        return Interval(*(100 * float(np.expm1(value)) for value in (mean.mean, mean.low, mean.high)))

    def by_sample(self) -> list[float]:
        """Mean divergence over each sample's positions; 0 without positions."""
        begins = np.cumsum(self.lengths) - self.lengths
        parts = [self.divergence[begin : begin + n] for begin, n in zip(begins, self.lengths, strict=True)]
        return [float(part.mean()) if part.size else 0.0 for part in parts]
