"""The common interface of weight files: facts about tensors without reading them, and one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import ml_dtypes  # noqa: F401 - numpy knows its dtypes by name from here on
import numpy as np
from numpy.typing import NDArray

Tensor: TypeAlias = NDArray[Any]

STRIP_ELEMENTS = 1 << 18  # expanded at a time, so that temporaries stay in the cache

FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")
FLOAT8_DTYPES = ("float8_e4m3fn", "float8_e8m0fnu")  # of quantized weights and their scales
INTEGER_DTYPES = ("int64", "int32", "int16", "int8", "uint8", "bool")
DTYPES = {name: np.dtype(name) for name in (*FLOAT_DTYPES, *FLOAT8_DTYPES, *INTEGER_DTYPES)}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    dtype: str  # a key of DTYPES, or the file format's own name if it is not supported
    shape: tuple[int, ...]
    nbytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class Rows(Protocol):
    """A tensor whose rows are read in pieces. An array qualifies; other classes make rows when they are requested."""

    def __getitem__(self, rows: slice, /) -> Tensor: ...


def whole(rows: Rows) -> Tensor:
    return rows if isinstance(rows, np.ndarray) else rows[:]  # one number has no rows


class TensorFile(Protocol):
    """One open weight file. Opening raises a CheckpointError that names the file if it is damaged."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> Rows:
        """The tensor in its own dtype; read-only if it is a view of the file. `name` must be in `tensors`."""
        ...

    def close(self) -> None: ...
