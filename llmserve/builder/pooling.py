"""Ops that only encoders have, in numpy for the reference: position tables and pooling."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.quantization import Matrix
from llmserve.models.graph import Op, OpKind

SMALLEST_NORM = 1e-12  # torch.nn.functional.normalize's guard
POOLED: Mapping[str, Callable[[Matrix], Matrix]] = {
    "first": lambda x: x[:1],
    "last": lambda x: x[-1:],
    "mean": lambda x: x.mean(axis=0, keepdims=True),
    "max": lambda x: x.max(axis=0, keepdims=True),
}


def pool(op: Op, x: Matrix) -> Matrix:
    y = POOLED[str(op.attrs["mode"])](x)
    if op.number("normalize"):
        y = y / max(np.sqrt(np.square(y, dtype=np.float64).sum()), SMALLEST_NORM)
    return y.astype(np.float32)


def _positions(op: Op, count: int, second_segment: int, table: Matrix) -> NDArray[np.int64]:
    return int(op.number("begin")) + np.arange(count)


def _segments(op: Op, count: int, second_segment: int, table: Matrix) -> NDArray[np.int64]:
    is_second = np.arange(count) >= (second_segment or count)
    return np.minimum(is_second, len(table) - 1).astype(np.int64)


# The rows of a table for `count` tokens.
POSITIONAL: Mapping[OpKind, Callable[[Op, int, int, Matrix], NDArray[np.int64]]] = {
    OpKind.EMBED_POSITION: _positions,
    OpKind.EMBED_SEGMENT: _segments,
}
