"""A contestant for tests of `tools.quality`: logits that are the token's id, and a little more for each precision.

Precision "float32" is the reference, "int8" is off by a little, "int4" by more, "float16" cannot be prepared, and
"Q4_K_M" has logits of another shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tools.quality.job import QualityJob

VOCAB = 7
ERRORS = {"float32": 0.0, "int8": 0.1, "int4": 0.5, "Q4_K_M": 0.0}


def prepare(job: QualityJob) -> None:
    if job.precision == "float16":
        raise RuntimeError("no converter for float16")


def open_logits(job: QualityJob) -> EchoLogits:
    return EchoLogits(job)


class EchoLogits:
    weight_bytes = 100

    def __init__(self, job: QualityJob) -> None:
        self._error = ERRORS[job.precision]
        self._vocab = VOCAB + (job.precision == "Q4_K_M")

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        rows = np.zeros((len(ids), self._vocab), np.float32)
        rows[np.arange(len(ids)), np.array(ids)] = 1
        rows[:, 0] += self._error
        return rows
