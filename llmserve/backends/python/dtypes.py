"""Converts between numpy's types, a config's (`TYPE_FP32`) and Triton's numbers, and tensors of strings to bytes."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.backends.python.errors import TritonModelException
from llmserve.serving.types import NUMPY_DTYPES

TRITON_STRING_TO_NUMPY = {f"TYPE_{name}": dtype.type for name, dtype in NUMPY_DTYPES.items() if name != "BF16"}
TRITON_STRING_TO_NUMPY["TYPE_STRING"] = np.object_
_NUMBERED = (
    np.bool_, np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16, np.int32, np.int64, np.float16, np.float32,
    np.float64, np.object_,
)  # fmt: skip
_LENGTH = struct.Struct("<I")


def triton_string_to_numpy(triton_type_string: str) -> type[Any]:
    """The numpy type of a config's data type, such as TYPE_FP32."""
    if triton_type_string not in TRITON_STRING_TO_NUMPY:
        raise TritonModelException(f"{triton_type_string} has no numpy type")
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> type[Any] | None:
    """By the number of TRITONSERVER_DataType; None for types that numpy lacks."""
    return _NUMBERED[data_type - 1] if 1 <= data_type <= len(_NUMBERED) else None


def numpy_to_triton_type(data_type: Any) -> int | None:
    dtype = np.dtype(data_type)
    if dtype.kind in "OSU":
        return len(_NUMBERED)
    return next((number for number, known in enumerate(_NUMBERED, 1) if dtype == known), None)


def serialize_byte_tensor(input_tensor: NDArray[Any]) -> bytes | None:
    """Each element after its length in four bytes, in C order; None without elements, or if they are not text."""
    if input_tensor.size == 0 or input_tensor.dtype.kind not in "OS":
        return None
    parts = []
    for element in input_tensor.flat:
        data = bytes(element) if isinstance(element, bytes) else str(element).encode()
        parts += [_LENGTH.pack(len(data)), data]
    return b"".join(parts)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> NDArray[np.object_]:
    """The elements of `serialize_byte_tensor`, in one dimension."""
    elements, offset = [], 0
    while offset < len(encoded_tensor):
        if offset + _LENGTH.size > len(encoded_tensor):
            raise TritonModelException("the encoded tensor ends within a length")
        (length,) = _LENGTH.unpack_from(encoded_tensor, offset)
        offset += _LENGTH.size
        if offset + length > len(encoded_tensor):
            raise TritonModelException("the encoded tensor ends within an element")
        elements.append(bytes(encoded_tensor[offset : offset + length]))
        offset += length
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array
