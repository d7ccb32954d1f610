"""A .safetensors file, through the safetensors library: it checks the header, and maps the file into memory."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
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
FLOAT8 = ("float8_e4m3fn", "float8_e8m0fnu")  # which the library has for torch only


class SafetensorsFile:
    def __init__(self, path: Path) -> None:
        self._path = path
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
        if (info := self._tensors[name]).dtype in FLOAT8:
            data = np.memmap(self._path, np.uint8, "r", self._offsets[name], (info.num_elements,))
            return np.asarray(data).view(DTYPES[info.dtype]).reshape(info.shape)
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self._name}: tensor {name} cannot be read: {error}") from error
        return tensor

    @cached_property
    def _offsets(self) -> dict[str, int]:
        """Where each tensor begins in the file, whose header the library has checked."""
        with self._path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
        return {name: 8 + length + header[name]["data_offsets"][0] for name in self._tensors}

    def close(self) -> None:
        self._file.__exit__(None, None, None)

    def _info(self, name: str) -> TensorInfo:
        header = self._file.get_slice(name)
        shape = tuple(header.get_shape())
        dtype = DTYPE_NAMES.get(header.get_dtype(), header.get_dtype())
        item_size = DTYPES[dtype].itemsize if dtype in DTYPES else 0
        return TensorInfo(dtype, shape, math.prod(shape) * item_size)
