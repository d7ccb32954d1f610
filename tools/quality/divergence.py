"""The distance of two distributions of the next token, by position. T positions, V vocabulary."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]  # [T, V]
ROWS_AT_ONCE = 256  # to limit the memory for float64


def divergences(wanted: Logits, found: Logits) -> NDArray[np.float64]:
    """Kullback-Leibler divergence of `found` from `wanted`, in nats: [T]."""
    parts = [
        _of_rows(wanted[begin : begin + ROWS_AT_ONCE], found[begin : begin + ROWS_AT_ONCE])
        for begin in range(0, len(wanted), ROWS_AT_ONCE)
    ]
    return np.concatenate(parts)


def same_best(wanted: Logits, found: Logits) -> NDArray[np.bool_]:
    """Where both have the same largest logit: [T]."""
    same: NDArray[np.bool_] = wanted.argmax(axis=1) == found.argmax(axis=1)
    return same


def _of_rows(wanted: Logits, found: Logits) -> NDArray[np.float64]:
    one, other = (rows - _log_sum(rows) for rows in (wanted.astype(np.float64), found.astype(np.float64)))
    total: NDArray[np.float64] = (np.exp(one) * (one - other)).sum(axis=1)
    return total


def _log_sum(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    top = rows.max(axis=1, keepdims=True)
    total: NDArray[np.float64] = top + np.log(np.exp(rows - top).sum(axis=1, keepdims=True))
    return total
