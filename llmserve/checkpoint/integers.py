"""Weights that a checkpoint has as integers, with a scale for each few: an engine of eight bits can keep them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

STEP_COLUMNS = 32  # that share a step


@dataclass(frozen=True, slots=True)
class Integers:
    """Rows of a weight that are `values * steps`, each step for its columns."""

    values: NDArray[np.signedinteger[Any]]  # [N, K]
    steps: NDArray[np.float32]  # [N, groups], of STEP_COLUMNS each; the last one may have fewer


@runtime_checkable
class IntegerRows(Protocol):
    """Rows that may have been made from integers."""

    def integers(self, rows: slice, /) -> Integers | None:
        """None where they were not, or steps are for other columns: for all rows or for none."""
        ...


def integers(source: object, rows: slice) -> Integers | None:
    """`rows` has both ends."""
    return source.integers(rows) if isinstance(source, IntegerRows) else None
