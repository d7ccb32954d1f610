"""A .safetensors file. The safetensors library checks the header; tensors are views of the file, mapped into memory."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from llmserve.checkpoint.stored_tensor import DTYPES, Tensor, TensorInfo
from llmserve.errors import CheckpointError

DTYPE_NAMES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
}
METADATA = "__metadata__"  # in the header, next to the tensors


class SafetensorsFile:
    def __init__(self, path: Path) -> None:
        try:
            with safe_open(path, framework="numpy") as file:
                self._tensors = {name: _info(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118 - not a mapping
            self._bytes: NDArray[np.uint8] = np.memmap(path, np.uint8, "r")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path.name} is damaged or not a safetensors file: {error}") from error
        self._offsets = _offsets(path)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> Tensor:
        info, begin = self._tensors[name], self._offsets[name]
        data = np.asarray(self._bytes[begin : begin + info.nbytes])
        return data.view(DTYPES[info.dtype]).reshape(info.shape)

    def close(self) -> None:
        self._bytes = np.empty(0, np.uint8)


def _offsets(path: Path) -> dict[str, int]:
    """The start of each tensor in the file; the library has checked its header."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(length))
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != METADATA}


def _info(header: Any) -> TensorInfo:
    """`header` is the library's slice of a tensor."""
    shape = tuple(header.get_shape())
    dtype = DTYPE_NAMES.get(header.get_dtype(), header.get_dtype())
    item_size = DTYPES[dtype].itemsize if dtype in DTYPES else 0
    return TensorInfo(dtype, shape, math.prod(shape) * item_size)
