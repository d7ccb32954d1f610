"""Writes a .safetensors file one tensor at a time.

The safetensors library writes a file from tensors that are all in memory; here the header is written first, from names,
types and shapes, and each tensor is written to its place when it is ready. The format: eight bytes of header length
(little-endian), a JSON header padded with spaces, then the data (github.com/huggingface/safetensors, README).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from llmserve.checkpoint.safetensors_file import DTYPE_NAMES
from llmserve.checkpoint.stored_tensor import DTYPES

STORED_NAMES = {name: stored for stored, name in DTYPE_NAMES.items()}
ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Planned:
    """The type and shape of a tensor to be written."""

    dtype: str  # a key of checkpoint.tensors.DTYPES
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


class SafetensorsWriter:
    """Use as a context manager. If it ends without an error, every planned tensor must have been written."""

    def __init__(self, path: Path, tensors: Mapping[str, Planned]) -> None:
        self._tensors = dict(tensors)
        self._missing = set(tensors)
        header, self._offsets = _header(tensors)
        self._file: BinaryIO = path.open("wb")
        self._file.write(header)

    def write(self, name: str, array: NDArray[Any]) -> None:
        planned = self._tensors[name]
        assert array.shape == planned.shape, f"{name}: {array.shape} instead of {planned.shape}"
        assert array.dtype == DTYPES[planned.dtype], f"{name}: {array.dtype} instead of {planned.dtype}"
        self._missing.remove(name)
        if planned.num_bytes:
            self._file.seek(self._offsets[name])
            self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        assert kind is not None or not self._missing, f"never written: {sorted(self._missing)}"


def _header(tensors: Mapping[str, Planned]) -> tuple[bytes, dict[str, int]]:
    """The file's beginning, and the place of each tensor's data."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position, offsets = 0, {}
    for name, planned in tensors.items():
        end = position + planned.num_bytes
        entries[name] = {
            "dtype": STORED_NAMES[planned.dtype], "shape": list(planned.shape), "data_offsets": [position, end]
        }  # fmt: skip
        offsets[name], position = position, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + offset for name, offset in offsets.items()}
