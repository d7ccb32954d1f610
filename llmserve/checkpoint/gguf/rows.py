"""A tensor of a GGUF file whose rows are expanded when they are requested."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmserve.checkpoint.blocks import BlockRows
from llmserve.checkpoint.gguf.block_types import BlockType
from llmserve.checkpoint.integers import Integers
from llmserve.checkpoint.stored_tensor import STRIP_ELEMENTS, Tensor


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """Tensors [experts, rows, ...] joined into one; their rows are consecutive or, `in_turns`, alternate."""

    parts: Sequence[ExpandedRows]
    is_transposed: bool
    in_turns: bool

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, *columns = self.parts[0].shape
        shape = (experts, rows * len(self.parts), *columns)
        return (experts, *reversed(shape[1:])) if self.is_transposed else shape

    def __getitem__(self, experts: slice, /) -> Tensor:
        found = [part[experts] for part in self.parts]
        if self.in_turns:
            both = np.stack(found, axis=2)
            joined = both.reshape(len(both), -1, *both.shape[3:])
        else:
            joined = np.concatenate(found, axis=1)
        return joined.swapaxes(1, 2) if self.is_transposed and joined.ndim == 3 else joined

    def matrix_rows(self, rows: slice, /) -> Tensor:
        """Rows of all experts' stacked matrices, with outputs as rows. Only these are expanded."""
        return self._merged(rows, ExpandedRows.rows_at)

    def blocks(self, rows: slice, /) -> BlockRows | None:
        """The same, as blocks."""
        kind = self.parts[0].kind
        if len({part.kind.name for part in self.parts}) > 1 or len(self.parts[0].shape) != 3 or kind.expand is None:
            return None
        packed = self._merged(rows, lambda part, places: part.packed_rows[places])
        return BlockRows(kind, packed.view(kind.layout).reshape(len(packed), -1), np.ones(len(packed), np.float32))

    def _merged(self, rows: slice, read: Callable[[ExpandedRows, NDArray[np.intp]], Tensor]) -> Tensor:
        """`read` returns rows of a part, by their places in that part's stacked matrices."""
        height = self.parts[0].shape[1]
        expert, row = np.divmod(np.arange(rows.start, rows.stop), height * len(self.parts))
        if self.in_turns:
            row, part_of_row = np.divmod(row, len(self.parts))
        else:
            part_of_row, row = np.divmod(row, height)
        places = expert * height + row
        found = [read(part, places[part_of_row == number]) for number, part in enumerate(self.parts)]
        merged: Tensor = np.empty((len(places), *found[0].shape[1:]), np.result_type(*found))
        for number, own in enumerate(found):
            merged[part_of_row == number] = own
        return merged


@dataclass(frozen=True, slots=True)
class JoinedHeads:
    """[heads, columns, rows] and [heads, rows, columns] as one matrix, with the rows of both head by head."""

    first: ExpandedRows
    second: ExpandedRows

    @property
    def shape(self) -> tuple[int, ...]:
        heads, columns, rows = self.first.shape
        return (heads * (rows + self.second.shape[1]), columns)

    def __getitem__(self, rows: slice, /) -> Tensor:
        height, (begin, end, _) = self.shape[0] // self.first.shape[0], rows.indices(self.shape[0])
        heads = slice(begin // height, -(-end // height))
        both = np.concatenate([self.first[heads].swapaxes(1, 2), self.second[heads]], axis=1)
        found: Tensor = both.reshape(-1, self.shape[1])[begin - heads.start * height : end - heads.start * height]
        return found


@dataclass(frozen=True, slots=True)
class JoinedMatrices:
    """Stacked matrices as one."""

    parts: Sequence[ExpandedRows]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def __getitem__(self, rows: slice, /) -> Tensor:
        found: Tensor = np.concatenate([part[own] for part, own in self._parts_of(rows)])
        return found

    def blocks(self, rows: slice, /) -> BlockRows | None:
        if len({part.kind.name for part in self.parts}) > 1:
            return None
        found = [part.blocks(own) for part, own in self._parts_of(rows)]
        stored = [each.blocks for each in found if each is not None]
        if len(stored) < len(found):
            return None
        return BlockRows(self.parts[0].kind, np.concatenate(stored), np.ones(rows.stop - rows.start, np.float32))

    def _parts_of(self, rows: slice) -> list[tuple[ExpandedRows, slice]]:
        begin, end, _ = rows.indices(self.shape[0])
        found, offset = [], 0
        for part in self.parts:
            first, last = max(begin - offset, 0), min(end - offset, part.shape[0])
            if first < last:
                found.append((part, slice(first, last)))
            offset += part.shape[0]
        return found


@dataclass(frozen=True, slots=True)
class ExpandedRows:
    """`shift` is added, which reverses a converter's change."""

    packed: NDArray[np.uint8]  # a view of the file
    kind: BlockType
    shape: tuple[int, ...]
    shift: float = 0.0

    def __getitem__(self, rows: slice, /) -> Tensor:
        """In float32, or in the file's own float type; then it is a view of the file if possible."""
        if len(self.shape) == 1:  # its blocks are not parts of one row
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

    def rows_at(self, places: NDArray[np.intp]) -> Tensor:
        """Rows of all experts' stacked matrices; numbers, if each expert has a single row."""
        if len(self.shape) < 3:
            return self[:].reshape(-1)[places]
        return self._expand(self.packed_rows[places].reshape(-1)).reshape(-1, self.shape[-1])

    @property
    def packed_rows(self) -> NDArray[np.uint8]:
        """Bytes of rows of all experts' stacked matrices."""
        return self.packed.reshape(math.prod(self.shape[:-1]), -1)

    def _chosen(self, rows: slice) -> NDArray[np.uint8]:
        """Bytes of rows with more than one element."""
        row_bytes = self.shape[-1] // self.kind.num_elements * self.kind.num_bytes
        return self.packed.reshape(*self.shape[:-1], row_bytes)[rows].reshape(-1)

    def _expand(self, packed: NDArray[np.uint8]) -> Tensor:
        """Expand the bytes of whole blocks to elements."""
        blocks: Tensor = packed.view(self.kind.layout)
        expand = self.kind.expand
        if expand is None:
            return blocks.astype(np.float32) + np.float32(self.shift) if self.shift else blocks
        values = np.empty((len(blocks), self.kind.num_elements), np.float32)
        strip = max(1, STRIP_ELEMENTS // self.kind.num_elements)
        with np.errstate(invalid="ignore", over="ignore"):  # reported when the values are used
            for start in range(0, len(blocks), strip):
                values[start : start + strip] = expand(blocks[start : start + strip])
        if self.shift:
            values += np.float32(self.shift)
        return values.reshape(-1)
