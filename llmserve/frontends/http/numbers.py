"""Compact arrays of numbers from JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.wire.request_memory import Share

MAX_NESTING = 100


def leaves_of(data: Any) -> list[Any]:
    """The leaves of nested lists, in order; a scalar is one leaf. `ValueError` for more than `MAX_NESTING` levels."""
    leaves: list[Any] = []
    stack: list[Iterator[Any]] = [iter([data])]
    while stack:
        for item in stack[-1]:
            if isinstance(item, list):
                if len(stack) > MAX_NESTING:
                    raise ValueError("nested too deep")
                stack.append(iter(item))
                break
            leaves.append(item)
        else:
            stack.pop()
    return leaves


class Numbers:
    """The leaves of an array that was parsed in pieces: numbers or booleans. It grows `share` by their size."""

    __slots__ = ("_pieces", "_share", "kinds", "num_values")

    def __init__(self, share: Share) -> None:
        self.kinds: set[type] = set()  # types of the leaves
        self.num_values = 0
        self._pieces: list[NDArray[Any]] = []
        self._share = share

    def __len__(self) -> int:
        return self.num_values

    def add(self, leaves: list[Any]) -> None:
        """Raises `ValueError` for other types, and for a mixture of numbers and booleans."""
        kinds = set(map(type, leaves))
        if not (self.kinds | kinds <= {int, float} or self.kinds | kinds == {bool}):
            raise ValueError("expected numbers or booleans")
        piece = _compact(leaves, kinds)
        self._share.grow(piece.nbytes)
        self._pieces.append(piece)
        self.kinds |= kinds
        self.num_values += len(leaves)

    def array(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        """All values as `dtype`, which must fit their kinds. Raises `OverflowError` if one is out of range."""
        array = np.empty(self.num_values, dtype)
        self._share.grow(array.nbytes)
        at = 0
        for piece in self._pieces:
            if dtype.kind in "iu":
                _check_range(piece, dtype)
            with np.errstate(over="ignore"):  # a number too large for FP32 is infinite, as in C++
                array[at : at + len(piece)] = piece
            at += len(piece)
        return array


def _compact(leaves: list[Any], kinds: set[type]) -> NDArray[Any]:
    if kinds == {bool}:
        return np.array(leaves, np.bool_)
    if float in kinds:
        return np.array(leaves, np.float64)  # an integer too large for float64 is too large for any tensor
    try:
        wide = np.array(leaves, np.int64)
        narrow = wide.astype(np.int32)
        return narrow if np.array_equal(narrow, wide) else wide
    except OverflowError:
        return np.array(leaves, np.uint64 if min(leaves) >= 0 else np.float64)


def _check_range(piece: NDArray[Any], dtype: np.dtype[Any]) -> None:
    limits = np.iinfo(dtype)
    if len(piece) and (piece.dtype.kind == "f" or not limits.min <= piece.min() or not piece.max() <= limits.max):
        raise OverflowError(f"a number that is out of range for {dtype}")
