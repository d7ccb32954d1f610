"""A weight with a scale for each block of its numbers; rows are expanded when they are requested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmserve.checkpoint.integers import STEP_COLUMNS, Integers
from llmserve.checkpoint.stored_tensor import STRIP_ELEMENTS, Tensor

Numbers = Callable[[slice], Tensor]  # some rows [rows, columns]; the slice has both ends


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """(number - zero) * scale, in float32. `scales` and `zeros` are [blocks of rows, blocks of columns]."""

    shape: tuple[int, int]
    numbers: Numbers
    scales: Tensor
    zeros: Tensor | None = None
    block_rows: int = 1  # rows that share a row of scales
    block_of: NDArray[np.intp] | None = None  # of each column; None: runs of equal length, in order

    def __getitem__(self, rows: slice, /) -> Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        values = np.empty((max(0, stop - start), self.shape[1]), np.float32)
        strip = max(1, STRIP_ELEMENTS // self.shape[1])
        for first in range(start, stop, strip):
            last = min(first + strip, stop)
            with np.errstate(invalid="ignore", over="ignore"):  # reported when the values are used
                self._expand(slice(first, last), values[first - start : last - start])
        return values

    def integers(self, rows: slice, /) -> Integers | None:
        width = self.shape[1] // self.scales.shape[1]  # of a block
        if self.block_of is not None or (width % STEP_COLUMNS and width < self.shape[1]):
            return None
        numbers = self.numbers(rows)
        blocks = np.arange(rows.start, rows.stop) // self.block_rows
        if any(stored.dtype.kind not in "iu" for stored in (numbers, self.zeros) if stored is not None):
            return None
        values = numbers.astype(np.int16)
        if self.zeros is not None:
            values -= np.repeat(self.zeros[blocks].astype(np.int16), width, axis=1)
        steps = self.scales[blocks].astype(np.float32)
        return Integers(values, np.repeat(steps, -(-width // STEP_COLUMNS), axis=1))

    def _expand(self, rows: slice, target: Tensor) -> None:
        numbers = self.numbers(rows)
        blocks = np.arange(rows.start, rows.stop) // self.block_rows
        if self.block_of is None:
            target = target.reshape(len(target), self.scales.shape[1], -1)
            numbers = numbers.reshape(target.shape)
        if self.zeros is not None:
            numbers = np.subtract(numbers, self._of_columns(self.zeros[blocks]), out=target)
        np.multiply(numbers, self._of_columns(self.scales[blocks]), out=target)

    def _of_columns(self, of_blocks: Tensor) -> Tensor:
        """[rows, blocks] -> float32 for each column; or with one more axis, for the columns of a run."""
        values = of_blocks.astype(np.float32)
        return values[:, :, np.newaxis] if self.block_of is None else values[:, self.block_of]


def blocks_of(num_columns: int, width: int) -> NDArray[np.intp] | None:
    """The block of each column if the last block may be narrower; None if no block is."""
    return None if num_columns % width == 0 else np.arange(num_columns) // width
