"""Rounding with feedback: the inputs that follow compensate for the error that rounding one input causes.

GPTQ (arXiv 2210.17323), applied to each block of inputs separately: all blocks are processed in parallel, and the gain
is the same. The second moments of the matrix's inputs determine how much of an error each input takes over.

Shapes in comments: B blocks, C inputs of a block, G groups of a block, N rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.quantization import SCHEMES, Grid, GridScheme, Matrix, Quantized, WeightPart
from llmserve.checkpoint.integers import Integers
from llmserve.models.number_formats import WeightFormat

BLOCK_INPUTS = 256
DAMPING = 0.01  # of the mean second moment, added to each input's, so that what the text lacks has no effect
DAMPING_OF_FEW = 2.0  # the same for as many tokens as inputs; less for more tokens, as fewer correlate by chance
SHARE_BITS = 20  # of the fraction of a share, which multiplies an error
ERROR_BITS = 22  # of an error, relative to the largest weight of a row
MOST_DIGITS = 2.0**24  # of either: a float64 holds the sum of 32 products exactly, in any order

Moments: TypeAlias = NDArray[np.float32]  # [B, C, C]
Shares: TypeAlias = NDArray[np.floating[Any]]  # [B, C, C]; [E, B, C, C] of a matrix that is those of E experts


def shares_of(moments: Moments, damping: float = DAMPING) -> Shares:
    """The part of an input's error that each later input of its block compensates for.

    Multiples of 2^-SHARE_BITS. Inputs that are always zero share nothing.
    """
    products = moments.astype(np.float64)
    sizes = np.einsum("bcc->bc", products)
    added = np.maximum(damping * sizes.mean(axis=1, keepdims=True), np.where(sizes > 0, 0.0, 1.0))
    damped = products + np.eye(moments.shape[1]) * added[:, None, :]
    # with L of the inverse = L L^T, column j of L says how later inputs compensate for input j
    lower = np.linalg.cholesky(np.linalg.inv(damped))
    shares = np.triu((lower / np.einsum("bcc->bc", lower)[:, None, :]).transpose(0, 2, 1), 1)
    digits = np.clip(np.rint(shares * 2.0**SHARE_BITS), -MOST_DIGITS, MOST_DIGITS)
    found: Shares = (digits / 2.0**SHARE_BITS).astype(np.float32)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class WithFeedback:
    """A scheme that compensates for each input's rounding error in later inputs. Rows are independent."""

    scheme: GridScheme
    shares: Shares
    pieces: int = 4  # because a step works on one input of each block
    is_stored: bool = False

    @property
    def format(self) -> WeightFormat:
        return self.scheme.format

    def quantize(self, rows: Matrix, begin: int = 0) -> Quantized:
        rounding = _Rounding(self.scheme, rows, self.shares)
        for first in range(0, self.shares.shape[1], self.format.group):
            rounding.round_group(first)
        return rounding.result(rows.shape[1])

    def keep(self, rows: Integers) -> tuple[Quantized, NDArray[np.bool_]] | None:
        """Kept integers need no feedback."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class OfExperts:
    """Like `WithFeedback`, for a matrix of stacked experts: each expert is rounded for its own inputs."""

    scheme: GridScheme
    shares: Shares  # [E, B, C, C]
    height: int  # of an expert's
    pieces: int = 4
    is_stored: bool = False

    @property
    def format(self) -> WeightFormat:
        return self.scheme.format

    def quantize(self, rows: Matrix, begin: int = 0) -> Quantized:
        first, skipped = divmod(begin, self.height)
        strips = enumerate(np.split(rows, range(self.height - skipped, len(rows), self.height)), first)
        found = [WithFeedback(self.scheme, self.shares[expert]).quantize(strip) for expert, strip in strips]
        zeros = [each.zeros for each in found if each.zeros is not None]
        return Quantized(
            self.format,
            np.concatenate([each.values for each in found]),
            np.concatenate([each.scales for each in found]),
            np.concatenate([each.row_scale for each in found]),
            np.concatenate(zeros) if zeros else None,
        )

    def keep(self, rows: Integers) -> tuple[Quantized, NDArray[np.bool_]] | None:
        return None


class _Rounding:
    """Rows while they are rounded: one group of inputs after the other, in all blocks in parallel."""

    def __init__(self, scheme: GridScheme, rows: Matrix, shares: Shares) -> None:
        self._count, (self._num_blocks, width, _) = len(rows), shares.shape
        padded = np.zeros((self._count, self._num_blocks * width), np.float32)
        padded[:, : rows.shape[1]] = rows
        # inputs at the same position of all blocks are adjacent: [C, B, N]
        self._left = np.ascontiguousarray(padded.reshape(self._count, self._num_blocks, width).transpose(2, 1, 0))
        self._scheme, self._shares = scheme, shares.astype(np.float32, copy=False)
        self._row_scale = scheme.row_scale(rows)
        self._of_blocks = np.tile(self._row_scale, self._num_blocks)
        # unit of the errors: a power of two for each row
        self._unit = np.exp2(np.frexp(np.abs(rows).max(axis=1))[1] - np.float64(ERROR_BITS))
        self._values: list[Matrix] = []
        self._grids: list[Grid] = []

    def round_group(self, begin: int) -> None:
        """Round the inputs from `begin` of every block, and subtract their errors from later inputs."""
        end = begin + self._scheme.format.group
        group, shares = self._left[begin:end], self._shares[:, begin:end]
        grid = self._scheme.grid(group.reshape(len(group), -1), self._of_blocks)
        self._grids.append(grid)
        inverse, errors = grid.inverse, np.empty_like(group)
        for place, weights in enumerate(group):
            flat = weights.reshape(-1)
            values = np.clip(np.rint(flat * inverse + grid.zero), grid.least, grid.most)
            self._values.append(values)
            errors[place] = (flat - (values - grid.zero) * grid.step).reshape(weights.shape)
            later = shares[:, place, begin + place + 1 : end].T[:, :, None]
            group[place + 1 :] -= later * errors[place]
        if end < len(self._left):
            self._left[end:] -= self._taken(errors, shares[:, :, end:])

    def _taken(self, errors: NDArray[np.float32], shares: Shares) -> NDArray[np.float32]:
        """[C, B, N]: the sum of the errors [G, B, N], each times its share [B, G, C]; exact, in any order."""
        digits = np.clip(np.rint(errors / self._unit), -MOST_DIGITS, MOST_DIGITS)
        products = np.matmul(shares.transpose(0, 2, 1).astype(np.float64), digits.transpose(1, 0, 2))
        taken: NDArray[np.float32] = (products * self._unit).astype(np.float32).transpose(1, 0, 2)
        return taken

    def result(self, num_inputs: int) -> Quantized:
        def by_row(of_places: Sequence[NDArray[Any]], wanted: int) -> NDArray[Any]:
            """Values of one position in all blocks, [places][B * N], in the order of a row's inputs."""
            stacked = np.stack(of_places).reshape(len(of_places), self._num_blocks, self._count)
            return stacked.transpose(2, 1, 0).reshape(self._count, -1)[:, :wanted]

        format = self._scheme.format
        num_groups = format.num_groups(num_inputs)
        zeros = [grid.zeros for grid in self._grids if grid.zeros is not None]
        return Quantized(
            format,
            by_row(self._values, num_inputs).astype(format.values),
            by_row([grid.scales for grid in self._grids], num_groups),
            self._row_scale,
            by_row(zeros, num_groups) if zeros else None,
        )


def with_feedback(
    quantized: Mapping[str, Sequence[WeightPart]], shares: Mapping[str, Shares]
) -> Mapping[str, Sequence[WeightPart]]:
    """Returns parts with the same formats, rounded with feedback if shares are known."""
    return {
        name: [replace(part, scheme=_scheme(part, shares[name])) for part in parts] if name in shares else parts
        for name, parts in quantized.items()
    }


def _scheme(part: WeightPart, shares: Shares) -> WithFeedback | OfExperts:
    scheme = SCHEMES[part.scheme.format.name]
    if shares.ndim == 3:
        return WithFeedback(scheme, shares)
    assert part.begin == 0, "experts have one format"
    return OfExperts(scheme, shares, part.end // len(shares))
