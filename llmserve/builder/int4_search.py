"""Finds scales and zero points of four bits: those with the smallest error for a group, among the storable ones."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

MOST_INT4, ZERO_STEPS, LARGEST_CODE = 15, 16, 255
REFINEMENTS = 3

Matrix: TypeAlias = NDArray[np.float32]
Vector: TypeAlias = NDArray[np.float32]


class Int4Search:
    """The best candidates so far, for groups that are columns [32, M].

    All operations are elementwise and sums have a fixed order, so the result is the same on every machine.
    """

    def __init__(self, groups: Matrix, row_scales: Vector) -> None:
        """`row_scales`: scales of the rows that the groups belong to."""
        self._groups, self._row_scales = groups, row_scales
        self._errors = np.full(groups.shape[1], np.inf, np.float32)
        self.values = np.zeros(groups.shape, np.uint8)
        self.codes = np.zeros(groups.shape[1], np.uint8)
        self.zeros = np.zeros(groups.shape[1], np.uint8)

    def refine(self) -> None:
        """Start from a scale that clips nothing."""
        low, high = smallest_and_largest(self._groups, axis=0)
        scales = (high - low) / np.float32(MOST_INT4)
        values = self.look_at(scales, quotients(-low, scales))
        for _ in range(REFINEMENTS):
            values = self.look_at(*_best_for(values, self._groups, scales))

    def look_at(self, scales: Vector, zeros: Vector) -> Matrix:
        """Try the nearest storable scales and zero points, given as floats, and find the best values for them."""
        codes = np.minimum(np.rint(np.sqrt(quotients(scales, self._row_scales))), LARGEST_CODE)
        zero_codes = np.clip(np.rint(zeros * ZERO_STEPS), 0, MOST_INT4 * ZERO_STEPS)
        scale, zero = codes * codes * self._row_scales, zero_codes / np.float32(ZERO_STEPS)
        values = self._groups * quotients(np.ones_like(scale), scale)
        values += zero
        np.rint(values, out=values)
        np.clip(values, 0, MOST_INT4, out=values)
        errors: Matrix = np.subtract(values, zero, dtype=np.float32)
        errors *= scale
        errors -= self._groups
        errors *= errors
        total = _sum(errors)
        better = total < self._errors
        np.copyto(self._errors, total, where=better)
        np.copyto(self.codes, codes.astype(np.uint8), where=better)
        np.copyto(self.zeros, zero_codes.astype(np.uint8), where=better)
        np.copyto(self.values, values.astype(np.uint8), where=better)
        return values


def _best_for(values: Matrix, groups: Matrix, largest: Vector) -> tuple[Vector, Vector]:
    """Scales, up to the largest one, and zero points with the smallest squared error for values [32, M]."""
    mean_value, mean_weight = (_sum(matrix) / np.float32(len(values)) for matrix in (values, groups))
    deviations: Matrix = np.subtract(values, mean_value, dtype=np.float32)
    scales = quotients(_sum(deviations * groups), _sum(deviations * deviations))
    scales = np.clip(scales, 0, largest)
    return scales, mean_value - quotients(mean_weight, scales)


def smallest_and_largest(groups: NDArray[np.float32], axis: int) -> tuple[Matrix, Matrix]:
    """The smallest and the largest value along an axis, zero included."""
    return np.minimum(groups.min(axis=axis), 0), np.maximum(groups.max(axis=axis), 0)


def quotients(dividends: Vector, divisors: Vector) -> Vector:
    """Divide; 0 / 0 is 0."""
    return np.divide(dividends, divisors, where=divisors > 0, out=np.zeros_like(dividends))


def _sum(rows: Matrix) -> Vector:
    total: Vector = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total
