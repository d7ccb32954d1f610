"""A tensor of a GGUF file whose rows are expanded when they are asked for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmserve.checkpoint.blocks import BlockRows
from llmserve.checkpoint.gguf.block_types import BlockType
from llmserve.checkpoint.integers import Integers
from llmserve.checkpoint.stored_tensor import STRIP_ELEMENTS, Tensor


@dataclass(frozen=True, slots=True)
class ExpandedRows:
    """`shift` undoes what a converter did: it is added."""

    packed: NDArray[np.uint8]  # a view of the file
    kind: BlockType
    shape: tuple[int, ...]
    shift: float = 0.0

    def __getitem__(self, rows: slice, /) -> Tensor:
        """In float32, or in the file's own type where that is a float; then a view of the file, if it can be one."""
        if len(self.shape) == 1:  # its blocks are not those of a row
            return self._expand(self.packed)[rows]
        return self._expand(self._chosen(rows)).reshape(-1, *self.shape[1:])

    def integers(self, rows: slice, /) -> Integers | None:
        if self.kind.integers is None or len(self.shape) != 2 or self.shift:
            return None
        blocks: Tensor = self._chosen(rows).view(self.kind.layout).reshape(rows.stop - rows.start, -1)
        values = self.kind.integers(blocks.reshape(-1))
        return Integers(values.reshape(len(blocks), -1), blocks["d"].astype(np.float32))

    def blocks(self, rows: slice, /) -> BlockRows | None:
        if self.kind.expand is None or len(self.shape) != 2 or self.shift:
            return None
        found: Tensor = self._chosen(rows).view(self.kind.layout).reshape(rows.stop - rows.start, -1)
        return BlockRows(self.kind, found, np.ones(len(found), np.float32))

    def _chosen(self, rows: slice) -> NDArray[np.uint8]:
        """Bytes of rows of more than one element."""
        row_bytes = self.shape[-1] // self.kind.num_elements * self.kind.num_bytes
        return self.packed.reshape(*self.shape[:-1], row_bytes)[rows].reshape(-1)

    def _expand(self, packed: NDArray[np.uint8]) -> Tensor:
        """Bytes of whole blocks to their elements."""
        blocks: Tensor = packed.view(self.kind.layout)
        expand = self.kind.expand
        if expand is None:
            return blocks.astype(np.float32) + np.float32(self.shift) if self.shift else blocks
        values = np.empty((len(blocks), self.kind.num_elements), np.float32)
        strip = max(1, STRIP_ELEMENTS // self.kind.num_elements)
        with np.errstate(invalid="ignore", over="ignore"):  # reported where the values are used
            for start in range(0, len(blocks), strip):
                values[start : start + strip] = expand(blocks[start : start + strip])
        if self.shift:
            values += np.float32(self.shift)
        return values.reshape(-1)
