"""A .safetensors file, through the safetensors library: it checks the header, and maps the file into memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
}


class SafetensorsFile:
    def __init__(self, path: Path) -> None:
        self._name = path.name
        try:
            file: Any = safe_open(path, framework="numpy")
            self._file = file
            self._tensors = {name: self._info(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path.name} is damaged or not a safetensors file: {error}") from error

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self._name}: tensor {name} cannot be read: {error}") from error
        return tensor

    def close(self) -> None:
        self._file.__exit__(None, None, None)

    def _info(self, name: str) -> TensorInfo:
        header = self._file.get_slice(name)
        shape = tuple(header.get_shape())
        dtype = DTYPE_NAMES.get(header.get_dtype(), header.get_dtype())
        item_size = DTYPES[dtype].itemsize if dtype in DTYPES else 0
        return TensorInfo(dtype, shape, math.prod(shape) * item_size)
