"""Rows of a tensor in another order, shape or size than in the file, made when they are requested."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from llmserve.checkpoint.blocks import BlockRows, blocks
from llmserve.checkpoint.integers import Integers, integers
from llmserve.checkpoint.stored_tensor import Rows, Tensor
from llmserve.models.spec import ChosenRows, LatentRows, Pairs, RowOrder, Shares

MOST_UNWANTED = 4  # times as many rows as requested are read at once


@dataclass(frozen=True, slots=True)
class ReorderedRows:
    """Row i is row `order[i]` of `source`. Rows that are requested together are close to each other, or in runs."""

    source: Rows
    order: NDArray[np.intp]

    def __getitem__(self, rows: slice, /) -> Tensor:
        wanted = self.order[rows]
        span = _span(wanted)
        if span.stop - span.start > MOST_UNWANTED * len(wanted):
            return np.concatenate([self.source[run] for run in _runs(wanted)])
        found: Tensor = self.source[span][wanted - span.start]
        return found

    def integers(self, rows: slice, /) -> Integers | None:
        wanted = self.order[rows]
        span = _span(wanted)
        found = integers(self.source, span)
        return found and Integers(found.values[wanted - span.start], found.steps[wanted - span.start])

    def blocks(self, rows: slice, /) -> BlockRows | None:
        wanted = self.order[rows]
        span = _span(wanted)
        found = blocks(self.source, span)
        places = wanted - span.start
        return found and BlockRows(found.kind, found.blocks[places], found.row_scale[places])


@runtime_checkable
class HasMatrixRows(Protocol):
    """Experts' matrices that are expanded by rows: otherwise each piece would expand a whole expert again."""

    def matrix_rows(self, rows: slice, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class StackedRows:
    """Stacked matrices of all experts, from a source of the shape [experts, rows, ...]."""

    source: Rows
    num_rows: int  # of each matrix
    is_transposed: bool = False  # the source is [experts, columns, rows]

    def __getitem__(self, rows: slice, /) -> Tensor:
        if isinstance(self.source, HasMatrixRows):
            return self.source.matrix_rows(rows)
        first, last = rows.start // self.num_rows, -(-rows.stop // self.num_rows)
        matrices = self.source[first:last]
        matrices = matrices.swapaxes(1, 2) if self.is_transposed else matrices
        offset = first * self.num_rows
        return matrices.reshape(-1, *matrices.shape[2:])[rows.start - offset : rows.stop - offset]

    def blocks(self, rows: slice, /) -> BlockRows | None:
        """A source with `blocks` or `matrix_rows` counts the rows of all matrices, and supports no transposition."""
        return blocks(self.source, rows)


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Row i is row i of `source` times `factors[i]`, in float32."""

    source: Rows
    factors: NDArray[np.float32]

    def __getitem__(self, rows: slice, /) -> Tensor:
        piece = self.source[rows].astype(np.float32)
        piece *= self.factors[rows].reshape(-1, *[1] * (piece.ndim - 1))
        return piece

    def integers(self, rows: slice, /) -> Integers | None:
        found = integers(self.source, rows)
        return found and Integers(found.values, found.steps * self.factors[rows, None])

    def blocks(self, rows: slice, /) -> BlockRows | None:
        found = blocks(self.source, rows)
        return found and replace(found, row_scale=found.row_scale * self.factors[rows])


@dataclass(frozen=True, slots=True)
class RowDifference:
    """One row: that of the first number minus that of the second, in float32."""

    source: Rows
    rows: tuple[int, ...]

    def __getitem__(self, rows: slice, /) -> Tensor:
        first, second = (self.source[row : row + 1].astype(np.float32) for row in self.rows)
        found: Tensor = (first - second)[rows]
        return found


def row_order(num_rows: int, stored: RowOrder) -> NDArray[np.intp]:
    """The places of a parameter's rows in a tensor with another order."""
    if isinstance(stored, ChosenRows):
        return np.array(stored.rows, np.intp)
    if isinstance(stored, Pairs):
        return pair_order(num_rows, stored.head_dim, stored.rotary_dim)
    if isinstance(stored, LatentRows):
        latent, turned = np.arange(stored.size), pair_order(stored.rotary_dim, stored.rotary_dim, stored.num_paired)
        return np.concatenate([stored.size + turned, latent, latent])
    if isinstance(stored, Shares):
        groups = np.arange(num_rows).reshape(-1, sum(stored.sizes))
        return np.concatenate([part.reshape(-1) for part in np.split(groups, np.cumsum(stored.sizes)[:-1], axis=1)])
    heads = np.arange(num_rows).reshape(stored.num_kv_heads, -1, stored.head_dim)
    return np.concatenate([part.reshape(-1) for part in np.split(heads, (-2, -1), axis=1)])


def pair_order(num_rows: int, head_dim: int, rotary_dim: int) -> NDArray[np.intp]:
    """The places of heads' rows that are stored by pairs of a rotary embedding; see `Pairs`."""
    heads = np.arange(num_rows).reshape(-1, head_dim)
    pairs = heads[:, :rotary_dim].reshape(len(heads), rotary_dim // 2, 2).swapaxes(1, 2).reshape(len(heads), -1)
    return np.concatenate([pairs, heads[:, rotary_dim:]], axis=1).reshape(-1)


def _runs(wanted: NDArray[np.intp]) -> list[slice]:
    """Adjacent rows."""
    runs = np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1)
    return [slice(int(run[0]), int(run[-1]) + 1) for run in runs]


def _span(wanted: NDArray[np.intp]) -> slice:
    return slice(int(wanted.min()), int(wanted.max()) + 1) if len(wanted) else slice(0, 0)
