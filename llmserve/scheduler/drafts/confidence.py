"""Estimates how likely a model's token is accepted, from the log-prob that the model gives it.

At first, the model's own probability is used. It can be overconfident, and with a temperature two models can sample the
same unlikely token. So the measured acceptance soon replaces it, for each level of probability.
"""

from __future__ import annotations

import math

NUM_LEVELS = 8
PRIOR = 10.0  # weight of the model's own probability, in tokens of a level
FORGETTING = 0.98  # weight of a token, relative to the next one of its level


class Confidence:
    def __init__(self) -> None:
        self._num_drafted = [PRIOR] * NUM_LEVELS
        self._num_drawn = [PRIOR * (level + 0.5) / NUM_LEVELS for level in range(NUM_LEVELS)]

    def probability(self, log_prob: float) -> float:
        level = _level(log_prob)
        return self._num_drawn[level] / self._num_drafted[level]

    def learn(self, log_prob: float, *, is_drawn: bool) -> None:
        level = _level(log_prob)
        self._num_drafted[level] = FORGETTING * self._num_drafted[level] + 1
        self._num_drawn[level] = FORGETTING * self._num_drawn[level] + is_drawn


def _level(log_prob: float) -> int:
    return min(int(NUM_LEVELS * math.exp(min(log_prob, 0.0))), NUM_LEVELS - 1)
