"""Weights that a GGUF file stores as blocks of codes; an engine can keep the blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from llmserve.checkpoint.gguf.block_types import BlockType


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows of a weight as blocks of one type; each row has a scale."""

    kind: BlockType
    blocks: NDArray[Any]  # [N, blocks of a row], of the type's layout
    row_scale: NDArray[np.float32]  # [N]

    @property
    def weight(self) -> NDArray[np.float32]:
        """[N, K], the numbers that the blocks represent."""
        expand = self.kind.expand
        assert expand is not None
        values: NDArray[np.float32] = expand(self.blocks.reshape(-1)).reshape(len(self.blocks), -1)
        return values * self.row_scale[:, None]


@runtime_checkable
class StoredInBlocks(Protocol):
    """Rows that may be blocks of a file."""

    def blocks(self, rows: slice, /) -> BlockRows | None:
        """The blocks of all these rows; None if any row has none."""
        ...


def blocks(source: object, rows: slice) -> BlockRows | None:
    """`rows` has both ends, and all its blocks have one type."""
    return source.blocks(rows) if isinstance(source, StoredInBlocks) else None
