"""Moves powers of two between the producer of an activation and its readers, so that both round better.

A channel that is large in an activation reduces the precision of the others in its group, and multiplies small weights.
Its producer (a norm's weight, a row of the up-projection or of the values) is divided by a power of two, and the
columns that read it are multiplied by it: the network computes the same numbers, bit for bit. This is SmoothQuant
(arXiv 2211.10438) with its strength of 0.5. Without calibration data the sizes of activations are estimated from
weights alone: embedding times norm for what is normalized, lengths of rows for the outputs of linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.digest import tensor_digest
from llmserve.builder.pieces import Each, Weight, one_by_one, row_pieces
from llmserve.builder.uses import Uses
from llmserve.checkpoint.blocks import BlockRows, blocks
from llmserve.checkpoint.floats import to_float32
from llmserve.checkpoint.integers import Integers, integers
from llmserve.models.graph import OpKind, Program

Load: TypeAlias = Callable[[str], Weight]
Vector: TypeAlias = NDArray[np.float64]
Factors: TypeAlias = Mapping[str, NDArray[np.float32]]
LEAST_EXPONENT = 2  # smaller ones are within the error of the estimate, and did more harm than good
LARGEST_EXPONENT = 20


@dataclass(frozen=True, slots=True)
class MeasuredSizes:
    """The largest absolute value of each input, by matrix, and the smallest power of two that is then worth moving."""

    peaks: Mapping[str, Vector]
    least_exponent: int


@dataclass(frozen=True, slots=True)
class Equalization:
    """Powers of two that multiply parameters: rows of matrices or elements of vectors, and columns of matrices."""

    rows: Factors
    columns: Factors

    @property
    def num_channels(self) -> int:
        """The number of channels that were changed."""
        return sum(int((factors != 1).sum()) for factors in self.columns.values())

    @property
    def digests(self) -> Mapping[str, str]:
        """The digest of each set of factors, under its own name."""
        sets = {"rows": self.rows, "columns": self.columns}
        return {f"{name}.{kind}": tensor_digest(made) for kind, all_of in sets.items() for name, made in all_of.items()}

    @property
    def facts(self) -> Mapping[str, int]:
        """Facts for the manifest; empty if nothing was examined."""
        return {"equalized_channels": self.num_channels} if self.columns else {}

    def with_rows(self, rows: Factors) -> Equalization:
        """A copy that also multiplies these rows."""
        both = {name: self.rows[name] * rows[name] for name in self.rows.keys() & rows.keys()}
        return Equalization({**self.rows, **rows, **both}, self.columns)

    def apply(self, load: Load) -> Load:
        """`load`, but parameters with factors are multiplied and are float32."""

        def load_equalized(name: str) -> Weight:
            weight, rows, columns = load(name), self.rows.get(name), self.columns.get(name)
            return weight if rows is None and columns is None else _Multiplied(weight, rows, columns)

        return load_equalized


@dataclass(frozen=True, slots=True)
class _Multiplied:
    """A weight times its factors, in float32."""

    weight: Weight
    rows: NDArray[np.float32] | None
    columns: NDArray[np.float32] | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def integers(self, rows: slice, /) -> Integers | None:
        """Rows stay integers if only powers of two multiply them."""
        found = None if self.columns is not None else integers(self.weight, rows)
        if found is None or self.rows is None:
            return found
        return Integers(found.values, found.steps * self.rows[rows, None])

    def blocks(self, rows: slice, /) -> BlockRows | None:
        """Rows of blocks multiply the scales of the blocks."""
        found = None if self.columns is not None else blocks(self.weight, rows)
        if found is None or self.rows is None:
            return found
        return replace(found, row_scale=found.row_scale * self.rows[rows])

    def __getitem__(self, rows: slice, /) -> NDArray[np.float32]:
        piece = to_float32(self.weight[rows])
        if self.rows is not None:
            piece *= self.rows[rows, None] if piece.ndim == 2 else self.rows[rows]
        if self.columns is not None:
            piece *= self.columns
        return piece


@dataclass(frozen=True, slots=True)
class Joint:
    """Channels of a value, between their producer and the matrices that read them.

    The maker is a norm's weight, or rows [start, start + width) of a matrix, whose bias goes along.
    """

    maker: tuple[str, ...]
    start: int
    width: int
    readers: tuple[str, ...]
    heads: tuple[int, int] = (1, 1)  # of values: the number of KV heads, and of query heads that read each

    def per_channel(self, columns: Vector) -> Vector:
        """The largest value of each channel, over the columns of all readers."""
        kv_heads, queries = self.heads
        found: Vector = columns.reshape(kv_heads, queries, -1).max(axis=1).reshape(-1)
        return found

    def per_column(self, channels: NDArray[np.float32]) -> NDArray[np.float32]:
        kv_heads, queries = self.heads
        return np.repeat(channels.reshape(kv_heads, 1, -1), queries, axis=1).reshape(-1)


def equalize(
    program: Program,
    quantized: Collection[str],
    load: Load,
    advance: Callable[[str, int], None],
    each: Each = one_by_one,
    measured: MeasuredSizes | None = None,
) -> Equalization:
    """Reads the matrices in `quantized` and the embedding; `advance` receives their names and bytes.

    If `measured` is given, sizes are not estimated.
    """
    norms, others = _joints(program, quantized)
    embedding = next(op.weights[0] for op in program.ops if op.kind is OpKind.EMBED)
    residual = np.sqrt(_mean_squares(load(embedding), each))
    sizes = {}
    for joint in norms:  # of the residual stream, or of something between
        size = np.abs(load(joint.maker[0])[:].astype(np.float64))
        sizes[joint.maker[0]] = size * residual if len(size) == len(residual) else size
    of_inputs = {name: sizes[joint.maker[0]] for joint in norms for name in joint.readers}
    rows: dict[str, NDArray[np.float32]] = {}
    columns: dict[str, NDArray[np.float32]] = {}

    def share(joint: Joint, made: Vector, peaks: Mapping[str, Vector]) -> None:
        """`made`: sizes of the producer's outputs. `peaks`: the largest weight of each column of the readers."""
        peak = np.max([joint.per_channel(peaks[name]) for name in joint.readers], axis=0)
        if measured:
            made = np.max([joint.per_channel(measured.peaks[name]) for name in joint.readers], axis=0)
        factors = powers_of_two(made, peak, measured.least_exponent if measured else LEAST_EXPONENT)
        for name in joint.maker:
            of_maker = rows.setdefault(name, np.ones(load(name).shape[0], np.float32))
            of_maker[joint.start : joint.start + joint.width] /= factors
        columns.update({name: joint.per_column(factors) for name in joint.readers})

    behind, before = _matrices(norms, others)
    peaks = {name: _column_peaks(load(name), None, partial(advance, name), each) for name in behind}
    for name in before:
        weight = load(name)
        for joint in others:
            if joint.maker[0] == name:
                inputs = of_inputs.get(name, np.ones(weight.shape[1]))
                made = slice(joint.start, joint.start + joint.width)
                share(joint, row_lengths(weight, made, inputs, each), peaks)
        # a large row is no longer large after the division
        peaks[name] = _column_peaks(weight, rows.get(name), partial(advance, name), each)
    for joint in norms:
        share(joint, sizes[joint.maker[0]], peaks)
    return Equalization(rows, columns)


def names_read(program: Program, quantized: Collection[str]) -> list[str]:
    """The matrices that `equalize` reports to `advance`, once for each time that it reads them."""
    behind, before = _matrices(*_joints(program, quantized))
    return [*behind, *before]


def _matrices(norms: Sequence[Joint], others: Sequence[Joint]) -> tuple[list[str], list[str]]:
    """Matrices that read the output of matrices, and matrices that produce it or read the output of a norm."""
    behind = [name for joint in others for name in joint.readers]
    before = [*(joint.maker[0] for joint in others), *(name for joint in norms for name in joint.readers)]
    return list(dict.fromkeys(behind)), list(dict.fromkeys(before))


def powers_of_two(size: Vector, peak: Vector, least_exponent: int = LEAST_EXPONENT) -> NDArray[np.float32]:
    """The powers of two that divide channels of these sizes and multiply the columns that read them."""
    known = (size > 0) & (peak > 0)
    if not known.any():
        return np.ones(len(size), np.float32)
    wanted = np.log2(size, where=known, out=np.zeros_like(size)) - np.log2(peak, where=known, out=np.zeros_like(peak))
    exponents = np.where(known, np.rint((wanted - np.median(wanted[known])) / 2), 0)
    exponents[np.abs(exponents) < least_exponent] = 0
    factors: NDArray[np.float32] = np.exp2(np.clip(exponents, -LARGEST_EXPONENT, LARGEST_EXPONENT)).astype(np.float32)
    return factors


def _column_peaks(
    weight: Weight, factors: NDArray[np.float32] | None, advance: Callable[[int], None], each: Each
) -> Vector:
    """The largest of each column, after `factors` multiply the rows. `advance` receives the bytes read."""

    def of_piece(rows: slice) -> tuple[int, NDArray[np.float32]]:
        piece = weight[rows]
        values = to_float32(piece)
        if factors is not None:
            values *= factors[rows, None]
        return piece.nbytes, np.abs(values, out=values).max(axis=0)

    peaks = np.zeros(weight.shape[1], np.float32)
    for num_bytes, found in each(of_piece, row_pieces(weight.shape)):
        np.maximum(peaks, found, out=peaks)
        advance(num_bytes)
    return peaks.astype(np.float64)


def row_lengths(weight: Weight, rows: slice, sizes: Vector | np.float64, each: Each) -> Vector:
    """Lengths of rows times the sizes of their inputs, in float64: the order of sums changes no power of two."""

    def of_piece(piece: slice) -> Vector:
        values = to_float32(weight[rows.start + piece.start : rows.start + piece.stop]) * sizes
        lengths: Vector = np.sqrt(np.einsum("nk,nk->n", values, values))
        return lengths

    return np.concatenate(list(each(of_piece, row_pieces((rows.stop - rows.start, weight.shape[1])))))


def _mean_squares(weight: Weight, each: Each) -> Vector:
    """The mean square of each column."""

    def of_piece(rows: slice) -> Vector:
        values = weight[rows].astype(np.float64)
        found: Vector = np.square(values, out=values).sum(axis=0)
        return found

    total = np.zeros(weight.shape[1])
    for found in each(of_piece, row_pieces(weight.shape)):
        total += found
    return total / weight.shape[0]


def _joints(program: Program, quantized: Collection[str]) -> tuple[list[Joint], list[Joint]]:
    """Joints after norms and linear layers, if every reader is quantized and the parameters have no other use."""
    graph = Uses(program)
    norms, others = [], []
    for op in program.ops:
        readers = graph.readers(op.output, quantized)
        if not readers:
            continue
        if graph.norm(op.output) and not op.number("offset") and graph.is_own(op):
            norms.append(Joint(op.weights, 0, op.width, readers))
        elif op.kind is OpKind.GATED_ACTIVATION and op.attrs["activation"] == "clamped":
            continue  # the activation is not linear in its gate
        elif op.kind is OpKind.GATED_ACTIVATION and (maker := graph.maker(op.inputs[0])) is not None:
            others.append(Joint(maker.weights, op.width, op.width, readers))
        elif op.kind is OpKind.ATTENTION and (part := graph.part(op.inputs[2])) is not None:
            maker, start = part
            heads = int(op.number("num_heads")), int(op.number("num_kv_heads"))
            width = heads[1] * int(op.number("head_dim"))
            others.append(Joint(maker.weights, start, width, readers, (heads[1], heads[0] // heads[1])))
    return norms, others
