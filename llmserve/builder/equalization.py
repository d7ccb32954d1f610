"""Moves powers of two between what makes an activation and what multiplies it, so that both round better.

A channel that is large in an activation costs the others of its group their precision, and meets small weights. What
makes it (a norm's weight, a row of the up-projection or of the values) is divided by a power of two, the columns that
read it are multiplied by it: the network computes the same numbers, to the bit. This is SmoothQuant (arXiv 2211.10438)
with its strength of 0.5. Without calibration data the sizes of activations are estimated from weights alone: embedding
times norm for what is normalized, lengths of rows for what comes out of a linear layer.
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
from llmserve.builder.uses import NORMS, Uses
from llmserve.checkpoint.blocks import BlockRows, blocks
from llmserve.checkpoint.floats import to_float32
from llmserve.checkpoint.integers import Integers, integers
from llmserve.models.graph import OpKind, Program

Load: TypeAlias = Callable[[str], Weight]
Vector: TypeAlias = NDArray[np.float64]
Factors: TypeAlias = Mapping[str, NDArray[np.float32]]
LEAST_EXPONENT = 2  # a smaller one is within what the estimate is wrong by, and did more harm than good
LARGEST_EXPONENT = 20


@dataclass(frozen=True, slots=True)
class MeasuredSizes:
    """The largest of each input of a matrix, by the matrix, and the smallest power of two that is then worth moving."""

    peaks: Mapping[str, Vector]
    least_exponent: int


@dataclass(frozen=True, slots=True)
class Equalization:
    """Powers of two that parameters are multiplied with: rows of matrices, elements of vectors; columns of matrices."""

    rows: Factors
    columns: Factors

    @property
    def num_channels(self) -> int:
        """How many were changed."""
        return sum(int((factors != 1).sum()) for factors in self.columns.values())

    @property
    def digests(self) -> Mapping[str, str]:
        """Of every set of factors, by a name of its own."""
        sets = {"rows": self.rows, "columns": self.columns}
        return {f"{name}.{kind}": tensor_digest(made) for kind, all_of in sets.items() for name, made in all_of.items()}

    @property
    def facts(self) -> Mapping[str, int]:
        """For the manifest; nothing where nothing was looked at."""
        return {"equalized_channels": self.num_channels} if self.columns else {}

    def with_rows(self, rows: Factors) -> Equalization:
        """These moved, too."""
        both = {name: self.rows[name] * rows[name] for name in self.rows.keys() & rows.keys()}
        return Equalization({**self.rows, **rows, **both}, self.columns)

    def apply(self, load: Load) -> Load:
        """`load`, with the parameters multiplied; those are float32."""

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
        """Powers of two that rows are multiplied with leave them integers."""
        found = None if self.columns is not None else integers(self.weight, rows)
        if found is None or self.rows is None:
            return found
        return Integers(found.values, found.steps * self.rows[rows, None])

    def blocks(self, rows: slice, /) -> BlockRows | None:
        """They take factors of rows into the scales of these."""
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
    """Channels of a value between what makes them and the matrices that read them.

    The maker is a norm's weight, or rows [start, start + width) of a matrix, whose bias goes along.
    """

    maker: tuple[str, ...]
    start: int
    width: int
    readers: tuple[str, ...]
    heads: tuple[int, int] = (1, 1)  # of values: KV heads, and how many query heads read each

    def per_channel(self, columns: Vector) -> Vector:
        """The largest for each channel, of what is known for the columns of a reader."""
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
    """Reads the matrices among `quantized`, and the embedding; `advance` is told their names and bytes.

    With `measured`, sizes are not estimated.
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
        """`made`: sizes of what the maker makes. `peaks`: the largest of each column of the readers."""
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
        # a large row that is divided is large no more
        peaks[name] = _column_peaks(weight, rows.get(name), partial(advance, name), each)
    for joint in norms:
        share(joint, sizes[joint.maker[0]], peaks)
    return Equalization(rows, columns)


def names_read(program: Program, quantized: Collection[str]) -> list[str]:
    """The matrices of which `equalize` tells, as often as it reads them."""
    behind, before = _matrices(*_joints(program, quantized))
    return [*behind, *before]


def _matrices(norms: Sequence[Joint], others: Sequence[Joint]) -> tuple[list[str], list[str]]:
    """Those that read what matrices make, and those that make it or read what a norm makes."""
    behind = [name for joint in others for name in joint.readers]
    before = [*(joint.maker[0] for joint in others), *(name for joint in norms for name in joint.readers)]
    return list(dict.fromkeys(behind)), list(dict.fromkeys(before))


def powers_of_two(size: Vector, peak: Vector, least_exponent: int = LEAST_EXPONENT) -> NDArray[np.float32]:
    """What channels of these sizes are divided by, and the columns that read them multiplied with."""
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
    """The largest of each column, once the rows are multiplied with `factors`. `advance` is told the bytes read."""

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
    """Of rows times the sizes of their inputs. In float64, so that no power of two depends on the order of sums."""

    def of_piece(piece: slice) -> Vector:
        values = to_float32(weight[rows.start + piece.start : rows.start + piece.stop]) * sizes
        lengths: Vector = np.sqrt(np.einsum("nk,nk->n", values, values))
        return lengths

    return np.concatenate(list(each(of_piece, row_pieces((rows.stop - rows.start, weight.shape[1])))))


def _mean_squares(weight: Weight, each: Each) -> Vector:
    """Of each column."""

    def of_piece(rows: slice) -> Vector:
        values = weight[rows].astype(np.float64)
        found: Vector = np.square(values, out=values).sum(axis=0)
        return found

    total = np.zeros(weight.shape[1])
    for found in each(of_piece, row_pieces(weight.shape)):
        total += found
    return total / weight.shape[0]


def _joints(program: Program, quantized: Collection[str]) -> tuple[list[Joint], list[Joint]]:
    """Of norms, and of linear layers; only where every reader is quantized and everything is used for this alone."""
    graph = Uses(program)
    norms, others = [], []
    for op in program.ops:
        readers = graph.readers(op.output, quantized)
        if not readers:
            continue
        if op.kind in NORMS and op.number("groups") == 1 and not op.number("offset") and graph.is_own(op):
            norms.append(Joint(op.weights, 0, op.width, readers))
        elif op.kind is OpKind.GATED_ACTIVATION and op.attrs["activation"] == "clamped":
            continue  # which is not linear in what it gates
        elif op.kind is OpKind.GATED_ACTIVATION and (maker := graph.maker(op.inputs[0])) is not None:
            others.append(Joint(maker.weights, op.width, op.width, readers))
        elif op.kind is OpKind.ATTENTION and (part := graph.part(op.inputs[2])) is not None:
            maker, start = part
            heads = int(op.number("num_heads")), int(op.number("num_kv_heads"))
            width = heads[1] * int(op.number("head_dim"))
            others.append(Joint(maker.weights, start, width, readers, (heads[1], heads[0] // heads[1])))
    return norms, others
