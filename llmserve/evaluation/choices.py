"""Multiple choice by likelihood: which of several continuations of a prompt is likeliest for a network?

    acc         whether the likeliest choice is the right one
    acc_norm    the same per character of the choice, which does not favour short choices
    acc_bytes   the same per byte of its UTF-8

Definitions are those of lm-evaluation-harness; the first of equal choices counts. Each is 100 or 0 per sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmserve.evaluation.answers import Answer, Sample

CHOICE_METRICS = ("acc", "acc_norm", "acc_bytes")


def likeliest(log_likelihoods: Sequence[float], lengths: Sequence[int] | None = None) -> int:
    """Index of the choice with the largest log-likelihood, divided by its length if lengths are given."""
    values = np.array(log_likelihoods)
    return int(np.argmax(values if lengths is None else values / np.array(lengths)))


def score_choices(samples: Sequence[Sample], answers: Sequence[Answer]) -> dict[str, NDArray[np.float64]]:
    """Every metric in `CHOICE_METRICS`, with one number per sample."""
    rows = [_chosen(sample, answer) for sample, answer in zip(samples, answers, strict=True)]
    right = [sample.choices.index(sample.reference) for sample in samples]
    is_right = np.array(rows) == np.array(right)[:, None]
    return {name: 100.0 * is_right[:, column] for column, name in enumerate(CHOICE_METRICS)}


def _chosen(sample: Sample, answer: Answer) -> tuple[int, int, int]:
    characters = [len(choice) for choice in sample.choices]
    num_bytes = [len(choice.encode()) for choice in sample.choices]
    values = answer.log_likelihoods
    return likeliest(values), likeliest(values, characters), likeliest(values, num_bytes)
