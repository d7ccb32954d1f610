"""Multiple choice by likelihood: of several ways in which a prompt may go on, which does a network find likeliest?

    acc         it is the right one
    acc_norm    so it is per character of the choice, which favours no short ones
    acc_bytes   per byte of its UTF-8

as lm-evaluation-harness counts them; the first of equals is the one. Each is 100 or 0 for a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmserve.evaluation.answers import Answer, Sample

CHOICE_METRICS = ("acc", "acc_norm", "acc_bytes")


def likeliest(log_likelihoods: Sequence[float], lengths: Sequence[int] | None = None) -> int:
    """Index of the choice with the largest log-likelihood, per unit of length where lengths are given."""
    values = np.array(log_likelihoods)
    return int(np.argmax(values if lengths is None else values / np.array(lengths)))


def score_choices(samples: Sequence[Sample], answers: Sequence[Answer]) -> dict[str, NDArray[np.float64]]:
    """Every metric of `CHOICE_METRICS`, one number a sample."""
    rows = [_chosen(sample, answer) for sample, answer in zip(samples, answers, strict=True)]
    right = [sample.choices.index(sample.reference) for sample in samples]
    is_right = np.array(rows) == np.array(right)[:, None]
    return {name: 100.0 * is_right[:, column] for column, name in enumerate(CHOICE_METRICS)}


def _chosen(sample: Sample, answer: Answer) -> tuple[int, int, int]:
    characters = [len(choice) for choice in sample.choices]
    num_bytes = [len(choice.encode()) for choice in sample.choices]
    values = answer.log_likelihoods
    return likeliest(values), likeliest(values, characters), likeliest(values, num_bytes)
