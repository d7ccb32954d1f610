"""Weights that a checkpoint stores as integers, with a scale per group; eight-bit engines can keep them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

STEP_COLUMNS = 32  # columns that share a step


@dataclass(frozen=True, slots=True)
class Integers:
    """Rows of a weight that are `values * steps`, with a step for each group of columns."""

    values: NDArray[np.signedinteger[Any]]  # [N, K]
    steps: NDArray[np.float32]  # [N, groups], of STEP_COLUMNS each; the last one may have fewer


@runtime_checkable
class IntegerRows(Protocol):
    """Rows that may be stored as integers."""

    def integers(self, rows: slice, /) -> Integers | None:
        """The integers of all these rows; None if there are none, or if steps have other columns."""
        ...


def integers(source: object, rows: slice) -> Integers | None:
    """`rows` has both ends."""
    return source.integers(rows) if isinstance(source, IntegerRows) else None
