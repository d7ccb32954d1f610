"""Ops that work on each row separately, for the reference: sums and factors."""

from __future__ import annotations

import numpy as np

from llmserve.builder.quantization import Matrix
from llmserve.models.graph import Op


def add(op: Op, a: Matrix, b: Matrix) -> Matrix:
    return a + b


def multiply(op: Op, a: Matrix, b: Matrix) -> Matrix:
    return a * b


def scale_by_position(op: Op, x: Matrix) -> Matrix:
    intervals = (np.arange(len(x)) + int(op.number("shift"))) // int(op.number("interval"))
    scaled: Matrix = x * (1 + op.number("strength") * np.log(1.0 + intervals)).astype(np.float32)[:, None]
    return scaled


def mix(op: Op, x: Matrix, z: Matrix, coefficients: Matrix | None = None) -> Matrix:
    groups, first = int(op.number("groups")), int(op.number("first"))
    streams = x.reshape(len(x), groups, -1)
    others = z.reshape(len(x), -1, streams.shape[2])
    factors = np.full((len(x), groups, others.shape[1]), np.float32(op.number("offset")))
    if coefficients is not None:
        factors += coefficients.reshape(factors.shape)
    factors[:, :first] = 0
    mixed: Matrix = (streams + np.einsum("tkj,tjw->tkw", factors, others)).astype(np.float32)
    return mixed.reshape(x.shape)


def spread(op: Op, x: Matrix, z: Matrix) -> Matrix:
    def mean_square(values: Matrix) -> Matrix:
        found: Matrix = np.mean(values * values, axis=-1, keepdims=True)
        return found

    groups = z.reshape(len(x), -1, x.shape[1])
    least = np.float32(op.number("least"))
    sized = groups * np.sqrt(mean_square(x))[:, None] / np.sqrt(np.maximum(mean_square(groups), least))
    return np.concatenate((x, sized.reshape(z.shape)), axis=1)


def over_threshold(op: Op, x: Matrix) -> Matrix:
    threshold = x.mean(axis=1, keepdims=True) + np.float32(op.number("deviations")) * x.std(axis=1, keepdims=True)
    passed: Matrix = np.maximum(x - threshold, np.float32(0))
    return passed
