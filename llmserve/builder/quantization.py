"""How weights and activations are rounded to few bits. The same for every target.

Thirty-two inputs of an output share a scale, and thirty-two inputs of a token, whose activations are rounded to int8
whatever the bits of the weights. Integers that a checkpoint has already are kept where they fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.pieces import Weight
from llmserve.checkpoint.floats import to_float32
from llmserve.checkpoint.integers import Integers, integers

QUANTIZED_GROUP = 32  # inputs that share a scale
NOTHING = np.float32(2.0**-100)  # numbers below have no inverse to multiply with
ROUNDED_ROWS = 256  # at a time, to keep temporaries small
MOST_INT4, ZERO_STEPS, LARGEST_CODE = 15, 16, 255
SEARCHED_ELEMENTS = 1 << 15  # of four bits at a time: temporaries that stay in a cache
REFINEMENTS = 3  # of scales and zero points of four bits

Matrix: TypeAlias = NDArray[np.float32]
Vector: TypeAlias = NDArray[np.float32]
Groups: TypeAlias = NDArray[np.float32]  # [N, groups, QUANTIZED_GROUP]


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight [N, K] is approximately `values * group_scales * row_scale`, each group scale for its inputs; with
    `zeros`, (values - zeros / ZERO_STEPS) in the place of values, and group scales are squares of `scales`."""

    values: NDArray[np.int8] | NDArray[np.uint8]  # [N, K]
    scales: NDArray[np.float16] | NDArray[np.uint8]  # [N, groups]
    row_scale: NDArray[np.float32]  # [N]
    zeros: NDArray[np.uint8] | None = None  # [N, groups]

    @property
    def group_scales(self) -> Matrix:
        """[N, groups], what `scales` stand for."""
        scales = self.scales.astype(np.float32)
        return scales if self.zeros is None else scales * scales

    @property
    def centered(self) -> Matrix:
        """[N, K], values minus zero points: exact."""
        values = self.values.astype(np.float32)
        if self.zeros is not None:
            values -= _of_columns(self.zeros.astype(np.float32) / np.float32(ZERO_STEPS), values.shape[1])
        return values

    @property
    def weight(self) -> Matrix:
        """[N, K], what an engine multiplies with."""
        scale = self.group_scales * self.row_scale[:, None]
        rounded: Matrix = self.centered * _of_columns(scale, self.values.shape[1])
        return rounded


def _of_columns(of_groups: Matrix, num_columns: int) -> Matrix:
    return np.repeat(of_groups, QUANTIZED_GROUP, axis=1)[:, :num_columns]


class Scheme(Protocol):
    """A number format of weights."""

    @property
    def name(self) -> str: ...

    @property
    def bits(self) -> float:
        """Of a weight, with its part of what its group has; an output's scale comes on top."""

    @property
    def pieces(self) -> int:
        """How many pieces of a weight are best rounded together."""

    def quantize(self, rows: Matrix) -> Quantized:
        """`rows` [N, K] in this format."""

    def keep(self, rows: Integers) -> tuple[Quantized, NDArray[np.bool_]] | None:
        """The same numbers to the bit, and in which rows they are; None where this format does not have integers."""

    def row_scale(self, rows: Matrix) -> Vector:
        """[N], what the scales of the groups of each row are relative to."""

    def grid(self, groups: Matrix, row_scales: Vector) -> Grid:
        """Scales and zero points for groups that are columns [QUANTIZED_GROUP, M], of rows with these scales [M]."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers (value - zero) * step that groups [M] may have, and how step and zero point are stored."""

    step: Vector
    zero: Vector | np.float32
    least: int
    most: int
    scales: NDArray[np.float16] | NDArray[np.uint8]
    zeros: NDArray[np.uint8] | None = None

    @property
    def inverse(self) -> Vector:
        return _quotients(np.ones_like(self.step), self.step)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [begin, end) of a weight, and their number format."""

    scheme: Scheme
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Int8:
    """Values from -127 to 127: the largest of a group becomes 127. Group scales are relative to the row's largest."""

    name: str = "int8"
    bits: float = 8 + 16 / QUANTIZED_GROUP
    pieces: int = 1

    def quantize(self, rows: Matrix) -> Quantized:
        groups = in_groups(rows)
        scale = np.abs(groups).max(axis=2) / np.float32(127)
        row_scale = scale.max(axis=1)
        scales = (scale / np.where(row_scale > 0, row_scale, np.float32(1))[:, None]).astype(np.float16)
        stored = scales.astype(np.float32) * row_scale[:, None]
        safe = np.where(stored == 0, np.float32(1), stored)
        values = np.clip(np.rint(groups / safe[:, :, None]), -127, 127).astype(np.int8)
        return Quantized(values.reshape(len(rows), -1)[:, : rows.shape[1]], scales, row_scale)

    def keep(self, rows: Integers) -> tuple[Quantized, NDArray[np.bool_]] | None:
        """Steps that are binary16 numbers, or such numbers times the largest or a power of two of their row."""
        largest = np.abs(rows.steps).max(axis=1)
        row_scale = np.zeros_like(largest)
        for candidate in (np.ones_like(largest), largest, np.exp2(np.frexp(largest)[1]).astype(np.float32)):
            known = np.where(candidate > 0, candidate, np.float32(1))
            exact = (_relative(rows.steps, known).astype(np.float32) * known[:, None] == rows.steps).all(axis=1)
            row_scale = np.where((row_scale == 0) & exact, known, row_scale)
        values = rows.values.astype(np.int8)
        fits = (values == rows.values).all(axis=1) & (row_scale != 0)
        return Quantized(values, _relative(rows.steps, np.where(fits, row_scale, 1)), row_scale), fits

    def row_scale(self, rows: Matrix) -> Vector:
        largest: Vector = np.abs(rows).max(axis=1) / np.float32(127)
        return largest

    def grid(self, groups: Matrix, row_scales: Vector) -> Grid:
        scales = _quotients(np.abs(groups).max(axis=0) / np.float32(127), row_scales).astype(np.float16)
        return Grid(scales.astype(np.float32) * row_scales, np.float32(0), -127, 127, scales)


def _relative(scales: Matrix, row_scale: Vector) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):  # infinite then
        return (scales / row_scale[:, None]).astype(np.float16)


@dataclass(frozen=True, slots=True)
class Int4:
    """Values from 0 to 15 with a zero point in sixteenths of a step. Scales and zero points have a byte each.

    A scale is the square of its code, so that groups a thousand times smaller than the row's largest still have one.
    Each group begins with what cuts nothing off; then the scale and the zero point that are best for its values, and
    the values that are best for these, are found in turn.
    """

    name: str = "int4"
    bits: float = 4 + 16 / QUANTIZED_GROUP
    pieces: int = 1

    def quantize(self, rows: Matrix) -> Quantized:
        count, cols = rows.shape
        groups = (count, -(-cols // QUANTIZED_GROUP))
        found = Quantized(
            np.empty(rows.shape, np.uint8), np.empty(groups, np.uint8), np.empty(count, np.float32),
            np.empty(groups, np.uint8),
        )  # fmt: skip
        step = max(1, SEARCHED_ELEMENTS // cols)
        for begin in range(0, count, step):
            _search_int4(rows, found, slice(begin, begin + step))
        return found

    def keep(self, rows: Integers) -> tuple[Quantized, NDArray[np.bool_]] | None:
        """Scales of a byte are those of no other format."""
        return None

    def row_scale(self, rows: Matrix) -> Vector:
        low, high = _range(in_groups(rows), axis=2)
        largest: Vector = (high - low).max(axis=1) / np.float32(MOST_INT4) / np.float32(LARGEST_CODE**2)
        return largest

    def grid(self, groups: Matrix, row_scales: Vector) -> Grid:
        search = _Int4Search(groups, row_scales)
        search.refine()
        codes = search.codes.astype(np.float32)
        zero = search.zeros.astype(np.float32) / np.float32(ZERO_STEPS)
        return Grid(codes * codes * row_scales, zero, 0, MOST_INT4, search.codes, search.zeros)


def _search_int4(weight: Matrix, found: Quantized, rows: slice) -> None:
    """Fills some rows of `found`."""
    groups = in_groups(weight[rows])
    count, num_groups, _ = groups.shape
    by_place = np.ascontiguousarray(groups.reshape(-1, QUANTIZED_GROUP).T)
    row_scale = Int4().row_scale(weight[rows])
    search = _Int4Search(by_place, np.repeat(row_scale, num_groups))
    search.refine()
    found.values[rows] = search.values.T.reshape(count, -1)[:, : weight.shape[1]]
    found.scales[rows] = search.codes.reshape(count, num_groups)
    found.row_scale[rows] = row_scale
    assert found.zeros is not None
    found.zeros[rows] = search.zeros.reshape(count, num_groups)


class _Int4Search:
    """The best of what was looked at, for groups that are columns [QUANTIZED_GROUP, M].

    Everything is done element by element, and sums are taken in order: the result is the same on every machine.
    """

    def __init__(self, groups: Matrix, row_scales: Vector) -> None:
        """`row_scales` of the rows that the groups belong to."""
        self._groups, self._row_scales = groups, row_scales
        self._errors = np.full(groups.shape[1], np.inf, np.float32)
        self.values = np.zeros(groups.shape, np.uint8)
        self.codes = np.zeros(groups.shape[1], np.uint8)
        self.zeros = np.zeros(groups.shape[1], np.uint8)

    def refine(self) -> None:
        """Begins with what cuts nothing off."""
        low, high = _range(self._groups, axis=0)
        scales = (high - low) / np.float32(MOST_INT4)
        values = self.look_at(scales, _quotients(-low, scales))
        for _ in range(REFINEMENTS):
            values = self.look_at(*_best_for(values, self._groups, scales))

    def look_at(self, scales: Vector, zeros: Vector) -> Matrix:
        """The values that are best for the nearest scales and zero points that can be stored, as floats."""
        codes = np.minimum(np.rint(np.sqrt(_quotients(scales, self._row_scales))), LARGEST_CODE)
        zero_codes = np.clip(np.rint(zeros * ZERO_STEPS), 0, MOST_INT4 * ZERO_STEPS)
        scale, zero = codes * codes * self._row_scales, zero_codes / np.float32(ZERO_STEPS)
        values = self._groups * _quotients(np.ones_like(scale), scale)
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
    """Scales, up to the largest, and zero points with the smallest squared error for values [QUANTIZED_GROUP, M]."""
    mean_value, mean_weight = (_sum(matrix) / np.float32(QUANTIZED_GROUP) for matrix in (values, groups))
    deviations: Matrix = np.subtract(values, mean_value, dtype=np.float32)
    scales = _quotients(_sum(deviations * groups), _sum(deviations * deviations))
    scales = np.clip(scales, 0, largest)
    return scales, mean_value - _quotients(mean_weight, scales)


def _range(groups: NDArray[np.float32], axis: int) -> tuple[Matrix, Matrix]:
    """The smallest and the largest along an axis, nothing among them."""
    return np.minimum(groups.min(axis=axis), 0), np.maximum(groups.max(axis=axis), 0)


def _quotients(dividends: Vector, divisors: Vector) -> Vector:
    """Nothing divided by nothing is nothing."""
    return np.divide(dividends, divisors, where=divisors > 0, out=np.zeros_like(dividends))


def _sum(rows: Matrix) -> Vector:
    total: Vector = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total


def in_groups(rows: Matrix) -> Groups:
    """[N, K] as [N, groups, QUANTIZED_GROUP], filled up with zeros."""
    count, cols = rows.shape
    num_groups = -(-cols // QUANTIZED_GROUP)
    if cols == num_groups * QUANTIZED_GROUP:
        return rows.reshape(count, num_groups, QUANTIZED_GROUP)
    padded = np.zeros((count, num_groups * QUANTIZED_GROUP), np.float32)
    padded[:, :cols] = rows
    return padded.reshape(count, num_groups, QUANTIZED_GROUP)


def quantize_rows(scheme: Scheme, weight: Weight, rows: slice) -> Quantized:
    """Rows of a weight, as they are where it has integers that the format can keep. `rows` has both ends."""
    stored = integers(weight, rows)
    found = None if stored is None else scheme.keep(stored)
    if found is None:
        return scheme.quantize(to_float32(weight[rows]))
    kept, fits = found
    if not fits.all():
        rounded = scheme.quantize(to_float32(weight[rows]))
        for mine, other in ((kept.values, rounded.values), (kept.scales, rounded.scales)):
            np.copyto(mine, other, where=~fits[:, None])
        np.copyto(kept.row_scale, rounded.row_scale, where=~fits)
    return kept


def keeps_integers(parts: Sequence[Part], weight: Weight) -> bool:
    """Whether some of the weight is in the checkpoint as integers that are kept, if they fit."""
    first = ((part.scheme, integers(weight, slice(part.begin, part.begin + 1))) for part in parts)
    return any(stored is not None and scheme.keep(stored) is not None for scheme, stored in first)


def round_weight(parts: Sequence[Part], weight: Weight, rows: slice) -> Matrix:
    """The values that rows of a weight have after quantization. `rows` has both ends.

    A few at a time: one copy of them and little more.
    """
    result = np.empty((rows.stop - rows.start, weight.shape[1]), np.float32)
    for part in parts:
        end = min(part.end, rows.stop)
        for begin in range(max(part.begin, rows.start), end, ROUNDED_ROWS):
            some = slice(begin, min(begin + ROUNDED_ROWS, end))
            result[some.start - rows.start : some.stop - rows.start] = quantize_rows(part.scheme, weight, some).weight
    return result


def round_activations(x: Matrix) -> Matrix:
    """As an engine rounds them before a quantized linear layer."""
    groups = in_groups(x)
    return round_to_steps(groups, 127).reshape(len(x), -1)[:, : x.shape[1]]


def round_to_steps(x: NDArray[np.float32], steps: int) -> NDArray[np.float32]:
    """To so many steps on each side of zero, with one scale for the numbers along the last axis; as kernels do it."""
    peak = np.abs(x).max(axis=-1, keepdims=True)
    inverse = np.float32(steps) / np.where(peak > NOTHING, peak, np.float32(np.inf))
    rounded: NDArray[np.float32] = np.rint(x * inverse) * (peak / np.float32(steps))
    return rounded
