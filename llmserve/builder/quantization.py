"""How weights and activations are rounded to few bits, and which parameters are; the same for every target.

`models/number_formats.py` describes the formats. Here, `SCHEMES` round to them, and a checkpoint's own integers are
kept where they fit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.int4_search import (
    LARGEST_CODE,
    MOST_INT4,
    ZERO_STEPS,
    Int4Search,
    quotients,
    smallest_and_largest,
)
from llmserve.builder.options import BuildOptions
from llmserve.builder.pieces import Weight
from llmserve.checkpoint.blocks import BlockRows, blocks
from llmserve.checkpoint.floats import to_float32
from llmserve.checkpoint.integers import Integers, integers
from llmserve.models.graph import OpKind, Program
from llmserve.models.number_formats import INT4, INT8, NumberFormat, WeightFormat
from llmserve.models.spec import Param

LINEAR_KINDS = (OpKind.LINEAR, OpKind.LOGITS)
MATRICES = {OpKind.LINEAR: 1, OpKind.LOGITS: 1, OpKind.EXPERTS: 2}  # which of an op's weights multiply
NOTHING = np.float32(2.0**-100)  # smaller numbers have no finite inverse
ROUNDED_ROWS = 256  # rows at a time, to keep temporaries small
SEARCHED_ELEMENTS = 1 << 15  # rows at a time with four bits: temporaries stay in a cache

Matrix: TypeAlias = NDArray[np.float32]
Vector: TypeAlias = NDArray[np.float32]
Groups: TypeAlias = NDArray[np.float32]  # [N, groups, numbers of a group]


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight [N, K] is approximately `values * group_scales * row_scale`, each group scale for its inputs. With
    `zeros`, values become (values - zeros / ZERO_STEPS), and group scales are squares of `scales`."""

    format: WeightFormat
    values: NDArray[np.int8] | NDArray[np.uint8]  # [N, K]
    scales: NDArray[np.float16] | NDArray[np.uint8]  # [N, groups]
    row_scale: NDArray[np.float32]  # [N]
    zeros: NDArray[np.uint8] | None = None  # [N, groups]

    @property
    def group_scales(self) -> Matrix:
        """[N, groups], the scales that `scales` encode."""
        scales = self.scales.astype(np.float32)
        return scales if self.zeros is None else scales * scales

    @property
    def centered(self) -> Matrix:
        """[N, K], values minus zero points: exact."""
        values = self.values.astype(np.float32)
        if self.zeros is not None:
            values -= self._of_columns(self.zeros.astype(np.float32) / np.float32(ZERO_STEPS))
        return values

    @property
    def weight(self) -> Matrix:
        """[N, K], what an engine multiplies with."""
        scale = self.group_scales * self.row_scale[:, None]
        rounded: Matrix = self.centered * self._of_columns(scale)
        return rounded

    def _of_columns(self, of_groups: Matrix) -> Matrix:
        return np.repeat(of_groups, self.format.group, axis=1)[:, : self.values.shape[1]]


class Scheme(Protocol):
    """Rounds weights to a format."""

    @property
    def format(self) -> WeightFormat: ...

    @property
    def pieces(self) -> int:
        """How many pieces of a weight are best rounded together."""

    def quantize(self, rows: Matrix, begin: int = 0) -> Quantized:
        """`rows` [N, K] in this format; `begin` is the weight's row of the first one."""

    def keep(self, rows: Integers) -> tuple[Quantized, NDArray[np.bool_]] | None:
        """The integers in this format, bit for bit, and which rows fit; None if it cannot store integers."""

    @property
    def is_stored(self) -> bool:
        """Whether rows already are blocks of a file."""


class GridScheme(Scheme, Protocol):
    """A scheme that supports rounding with feedback."""

    def row_scale(self, rows: Matrix) -> Vector:
        """[N], what the group scales of each row are relative to."""

    def grid(self, groups: Matrix, row_scales: Vector) -> Grid:
        """Scales and zero points of groups that are columns [numbers, M], in rows with the scales [M]."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers (value - zero) * step that groups [M] can represent, and how step and zero point are stored."""

    step: Vector
    zero: Vector | np.float32
    least: int
    most: int
    scales: NDArray[np.float16] | NDArray[np.uint8]
    zeros: NDArray[np.uint8] | None = None

    @property
    def inverse(self) -> Vector:
        return quotients(np.ones_like(self.step), self.step)


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Rows [begin, end) of a weight, and the scheme that rounds them."""

    scheme: Scheme
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Int8:
    """Values from -127 to 127: the largest of a group becomes 127. Group scales are relative to the row's largest."""

    format: WeightFormat = INT8
    pieces: int = 1
    is_stored: bool = False

    def quantize(self, rows: Matrix, begin: int = 0) -> Quantized:
        groups = in_groups(rows, self.format)
        scale = np.abs(groups).max(axis=2) / np.float32(127)
        row_scale = scale.max(axis=1)
        scales = (scale / np.where(row_scale > 0, row_scale, np.float32(1))[:, None]).astype(np.float16)
        stored = scales.astype(np.float32) * row_scale[:, None]
        safe = np.where(stored == 0, np.float32(1), stored)
        values = np.clip(np.rint(groups / safe[:, :, None]), -127, 127).astype(np.int8)
        return Quantized(self.format, values.reshape(len(rows), -1)[:, : rows.shape[1]], scales, row_scale)

    def row_scale(self, rows: Matrix) -> Vector:
        largest: Vector = np.abs(rows).max(axis=1) / np.float32(127)
        return largest

    def grid(self, groups: Matrix, row_scales: Vector) -> Grid:
        scales = quotients(np.abs(groups).max(axis=0) / np.float32(127), row_scales).astype(np.float16)
        return Grid(scales.astype(np.float32) * row_scales, np.float32(0), -127, 127, scales)

    def keep(self, rows: Integers) -> tuple[Quantized, NDArray[np.bool_]] | None:
        """Keeps steps that are binary16 numbers, or such numbers times the largest or a power of two of their row."""
        largest = np.abs(rows.steps).max(axis=1)
        row_scale = np.zeros_like(largest)
        for candidate in (np.ones_like(largest), largest, np.exp2(np.frexp(largest)[1]).astype(np.float32)):
            known = np.where(candidate > 0, candidate, np.float32(1))
            exact = (_relative(rows.steps, known).astype(np.float32) * known[:, None] == rows.steps).all(axis=1)
            row_scale = np.where((row_scale == 0) & exact, known, row_scale)
        values = rows.values.astype(np.int8)
        fits = (values == rows.values).all(axis=1) & (row_scale != 0)
        return Quantized(self.format, values, _relative(rows.steps, np.where(fits, row_scale, 1)), row_scale), fits


def _relative(scales: Matrix, row_scale: Vector) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):  # infinite then
        return (scales / row_scale[:, None]).astype(np.float16)


@dataclass(frozen=True, slots=True)
class Int4:
    """Values from 0 to 15 with a zero point in sixteenths of a step. Scales and zero points have a byte each.

    A scale is the square of its code, so that groups a thousand times smaller than the row's largest still have one.
    For each group, the search starts with a scale that clips nothing. Then it alternates between the best scale and
    zero point for the values and the best values for these.
    """

    format: WeightFormat = INT4
    pieces: int = 1
    is_stored: bool = False

    def quantize(self, rows: Matrix, begin: int = 0) -> Quantized:
        step = max(1, SEARCHED_ELEMENTS // rows.shape[1])
        strips = [self._searched(rows[begin : begin + step]) for begin in range(0, len(rows), step)]
        return Quantized(self.format, *map(np.concatenate, zip(*strips, strict=True)))

    def keep(self, rows: Integers) -> tuple[Quantized, NDArray[np.bool_]] | None:
        """None: scales of one byte cannot represent another format's scales."""
        return None

    def row_scale(self, rows: Matrix) -> Vector:
        low, high = smallest_and_largest(in_groups(rows, self.format), axis=2)
        largest: Vector = (high - low).max(axis=1) / np.float32(MOST_INT4) / np.float32(LARGEST_CODE**2)
        return largest

    def grid(self, groups: Matrix, row_scales: Vector) -> Grid:
        search = Int4Search(groups, row_scales)
        search.refine()
        codes = search.codes.astype(np.float32)
        zero = search.zeros.astype(np.float32) / np.float32(ZERO_STEPS)
        return Grid(codes * codes * row_scales, zero, 0, MOST_INT4, search.codes, search.zeros)

    def _searched(self, rows: Matrix) -> tuple[NDArray[Any], ...]:
        """Values, scales, scales of rows and zero points."""
        groups = in_groups(rows, self.format)
        count, num_groups, length = groups.shape
        row_scale = self.row_scale(rows)
        search = Int4Search(np.ascontiguousarray(groups.reshape(-1, length).T), np.repeat(row_scale, num_groups))
        search.refine()
        codes, zeros = (each.reshape(count, num_groups) for each in (search.codes, search.zeros))
        return search.values.T.reshape(count, -1)[:, : rows.shape[1]], codes, row_scale, zeros


SCHEMES: Mapping[str, GridScheme] = {scheme.format.name: scheme for scheme in (Int8(), Int4())}


def in_groups(rows: Matrix, format: NumberFormat) -> Groups:
    """[N, K] as [N, groups, numbers of a group], padded with zeros."""
    count, cols = rows.shape
    padded_cols = format.num_groups(cols) * format.group
    if cols < padded_cols:
        padded = np.zeros((count, padded_cols), np.float32)
        padded[:, :cols] = rows
        rows = padded
    return rows.reshape(count, -1, format.group)


def quantize_rows(scheme: Scheme, weight: Weight, rows: slice) -> Quantized | BlockRows:
    """Round rows of a weight, but keep integers that the format can store. `rows` has both ends."""
    if scheme.is_stored:
        of_file = blocks(weight, rows)
        assert of_file is not None
        return of_file
    stored = integers(weight, rows)
    found = None if stored is None else scheme.keep(stored)
    if found is None:
        return scheme.quantize(to_float32(weight[rows]), rows.start)
    kept, fits = found
    if not fits.all():
        rounded = scheme.quantize(to_float32(weight[rows]), rows.start)
        for mine, other in ((kept.values, rounded.values), (kept.scales, rounded.scales)):
            np.copyto(mine, other, where=~fits[:, None])
        np.copyto(kept.row_scale, rounded.row_scale, where=~fits)
    return kept


def keeps_integers(parts: Sequence[WeightPart], weight: Weight) -> bool:
    """Whether part of the weight is integers in the checkpoint, which are kept if they fit."""
    if any(part.scheme.is_stored for part in parts):
        return True
    first = ((part.scheme, integers(weight, slice(part.begin, part.begin + 1))) for part in parts)
    return any(stored is not None and scheme.keep(stored) is not None for scheme, stored in first)


def round_weight(parts: Sequence[WeightPart], weight: Weight, rows: slice) -> Matrix:
    """The values that rows of a weight have after quantization. `rows` has both ends.

    Works on a few rows at a time, and needs little more memory than a copy.
    """
    result = np.empty((rows.stop - rows.start, weight.shape[1]), np.float32)
    for part in parts:
        end = min(part.end, rows.stop)
        for begin in range(max(part.begin, rows.start), end, ROUNDED_ROWS):
            some = slice(begin, min(begin + ROUNDED_ROWS, end))
            result[some.start - rows.start : some.stop - rows.start] = quantize_rows(part.scheme, weight, some).weight
    return result


def round_in_groups(x: Matrix, format: NumberFormat) -> Matrix:
    """Round as an engine rounds activations before a quantized linear layer."""
    return round_to_steps(in_groups(x, format), format.most).reshape(len(x), -1)[:, : x.shape[1]]


def mix_heads(heads: Matrix) -> Matrix:
    """The Walsh-Hadamard transform of each row, block by block, with sums and differences in the kernels' order."""
    mixed, begin = heads.copy(), 0
    for count in mixed_blocks(heads.shape[1]):
        block, half = mixed[:, begin : begin + count], 1
        while half < count:
            first, second = np.moveaxis(block.reshape(len(heads), -1, 2, half), 2, 0)
            block, half = np.stack((first + second, first - second), axis=2).reshape(len(heads), count), 2 * half
        mixed[:, begin : begin + count] = block
        begin += count
    return mixed


def mixed_blocks(width: int) -> list[int]:
    """Powers of two whose sum is `width`, in descending order. If both factors are transformed, their product grows by
    the width of the block."""
    return [1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1]


def round_to_steps(x: NDArray[np.float32], steps: int) -> NDArray[np.float32]:
    """Round to so many steps on each side of zero, with one scale along the last axis, as kernels do."""
    peak = np.abs(x).max(axis=-1, keepdims=True)
    inverse = np.float32(steps) / np.where(peak > NOTHING, peak, np.float32(np.inf))
    rounded: NDArray[np.float32] = np.rint(x * inverse) * (peak / np.float32(steps))
    return rounded


def quantized_params(
    program: Program, params: Sequence[Param], options: BuildOptions
) -> Mapping[str, Sequence[WeightPart]]:
    """Parameters that are quantized, and how: those that are quantizable and are only used as matrices.

    The head uses the wider format, if there is one: logits are compared with each other, and it is a small part of a
    model. The values of attention also use it, and then the readers of its output, as far as `most_bits` allows: their
    error costs most for their size, as with K-quants.
    """
    weights = options.weights
    if not weights.is_rounded:
        return {}
    shapes = {param.name: param.shape for param in params if param.quantizable}
    matrices = {name: op.kind for op in program.ops for name in op.weights[: MATRICES.get(op.kind, 0)]}
    elsewhere = {name for op in program.ops for name in op.weights[MATRICES.get(op.kind, 0) :]}
    names = {name: kind for name, kind in matrices.items() if name in shapes and name not in elsewhere}
    scheme, wider = SCHEMES[weights.name], SCHEMES[(weights.wider or weights).name]
    found = {
        name: (WeightPart(wider if kind is OpKind.LOGITS else scheme, 0, shapes[name][0]),)
        for name, kind in names.items()
    }
    layers = {name: shapes[name] for name, kind in names.items() if kind is not OpKind.LOGITS and weights.wider}
    return found | _with_more_bits(program, layers, weights.most_bits, (scheme, wider))


def rounded_tables(
    program: Program, params: Sequence[Param], quantized: Mapping[str, Sequence[WeightPart]]
) -> Mapping[str, Sequence[WeightPart]]:
    """Embeddings next to a quantized head, rounded like it: if their numbers are equal, both are one matrix."""
    rows = {param.name: param.shape[0] for param in params}
    heads = {op.weights[0] for op in program.ops if op.kind is OpKind.LOGITS} & quantized.keys()
    tables = {op.weights[0] for op in program.ops if op.kind is OpKind.EMBED} - quantized.keys()
    return {name: (WeightPart(quantized[head][0].scheme, 0, rows[name]),) for name in tables for head in heads}


def _with_more_bits(
    program: Program, layers: Mapping[str, Sequence[int]], most_bits: float, schemes: tuple[Scheme, Scheme]
) -> dict[str, tuple[WeightPart, ...]]:
    """Matrices in which some rows use the wider format."""
    (scheme, wider), (few, many) = schemes, (each.format.bits_with_scales for each in schemes)
    total = sum(rows * cols for rows, cols in layers.values())
    used = sum(rows * cols * (few + 32 / cols) for rows, cols in layers.values())
    found: dict[str, tuple[WeightPart, ...]] = {}
    for name, begin, end in (*_value_rows(program), *_readers_of_attention(program)):
        if name not in layers or name in found:
            continue
        rows, cols = layers[name]
        more = (end - begin) * cols * (many - few)
        if used + more <= most_bits * total:
            used += more
            parts = (WeightPart(scheme, 0, begin), WeightPart(wider, begin, end), WeightPart(scheme, end, rows))
            found[name] = tuple(part for part in parts if part.begin < part.end)
    return found


def _value_rows(program: Program) -> Iterator[tuple[str, int, int]]:
    """Matrices, and their rows that produce values of the attention, layer by layer."""
    made_by = {op.output: op for op in program.ops}
    added = {name for op in program.ops if op.kind is OpKind.ADD for name in op.inputs}
    for value in (made_by[op.inputs[2]] for op in program.ops if op.kind is OpKind.ATTENTION):
        # a latent, which is also part of keys, comes after a norm
        maker, start = made_by[value.inputs[0]] if value.output in added else value, 0
        if maker.kind is OpKind.SLICE:
            maker, start = made_by[maker.inputs[0]], int(maker.number("start"))
        if maker.kind is OpKind.LINEAR:
            yield maker.weights[0], start, start + value.width


def _readers_of_attention(program: Program) -> Iterator[tuple[str, int, int]]:
    attended = {op.output for op in program.ops if op.kind is OpKind.ATTENTION}
    for op in program.ops:
        if op.kind is OpKind.LINEAR and op.inputs[0] in attended:
            yield op.weights[0], 0, op.width


def stored_names(params: Sequence[Param], quantized: Collection[str]) -> Mapping[str, str]:
    """Map each parameter to the name under which its numbers are stored.

    Parameters made from the same sources in the same way (a head tied to the embedding) are stored once, under the
    first one's name, if all or none of them are quantized.
    """
    first: dict[object, str] = {}
    origins = {p.name: (p.sources, p.combine, p.difference, p.shape, p.name in quantized) for p in params}
    return {name: first.setdefault(origin, name) for name, origin in origins.items()}


def num_matrices(params: Sequence[Param], quantized: Collection[str]) -> int:
    """The number of matrices stored for these parameters."""
    return len({stored for name, stored in stored_names(params, quantized).items() if name in quantized})
