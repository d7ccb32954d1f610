"""`pb_utils.Tensor`: what a model sees of a tensor.

A model may change the arrays that it gets and reuse those that it gives, so both ways are copies, made when needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.backends.python.errors import TritonModelException
from llmserve.serving import types as wire

_DATATYPES = {dtype: name for name, dtype in wire.NUMPY_DTYPES.items() if name not in ("BF16", "BYTES")}
_CONFIG_TYPES = {f"TYPE_{name}": dtype.type for name, dtype in wire.NUMPY_DTYPES.items() if name != "BF16"}
_CONFIG_TYPES["TYPE_STRING"] = np.object_
_CPU = (1, 0)  # DLPack's device type and number


def triton_string_to_numpy(triton_type_string: str) -> type[Any]:
    """The numpy type of a config's data type, such as TYPE_FP32."""
    if triton_type_string not in _CONFIG_TYPES:
        raise TritonModelException(f"{triton_type_string} has no numpy type")
    return _CONFIG_TYPES[triton_type_string]


class _Capsule:
    """A bare DLPack capsule in the form that numpy takes."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU


class Tensor:
    __slots__ = ("_array", "_datatype", "_is_borrowed", "_name")

    def __init__(self, name: str, array: NDArray[Any]) -> None:
        if not isinstance(array, np.ndarray):
            raise TritonModelException(f"tensor '{name}' must be made from a numpy array, got {type(array).__name__}")
        self._name = name
        self._array = array
        self._datatype = _datatype(name, array)
        self._is_borrowed = False

    @classmethod
    def borrow(cls, tensor: wire.Tensor) -> Tensor:
        """A tensor whose array belongs to the server and must not be changed."""
        self = cls.__new__(cls)
        self._name, self._array, self._datatype, self._is_borrowed = tensor.name, tensor.data, tensor.datatype, True
        return self

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """From a tensor in CPU memory that speaks DLPack, or its capsule, without a copy."""
        source = tensor if hasattr(tensor, "__dlpack__") else _Capsule(tensor)
        try:
            return Tensor(name, np.from_dlpack(source))
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TritonModelException(f"tensor '{name}' cannot be read through DLPack: {error}") from error

    def name(self) -> str:
        return self._name

    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    def triton_dtype(self) -> str:
        return self._datatype

    def is_cpu(self) -> bool:
        return True

    def as_numpy(self) -> NDArray[Any]:
        """The model's own array."""
        if self._datatype == "BF16" and self._is_borrowed:
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
            )
        if self._is_borrowed:
            self._array, self._is_borrowed = self._array.copy(), False
        return self._array

    def to_dlpack(self) -> Any:
        """A DLPack capsule of the model's own array."""
        return self.as_numpy().__dlpack__()

    def to_wire(self) -> wire.Tensor:
        """A copy that the model can no longer change."""
        array = self._array
        if self._datatype == "BYTES":
            data = array if self._is_borrowed else _as_bytes(self._name, array)
        elif self._datatype == "BF16":
            data = array.view(np.uint16).copy()
        else:
            data = array if self._is_borrowed else array.copy()
        return wire.Tensor(self._name, self._datatype, data)


def _datatype(name: str, array: NDArray[Any]) -> str:
    if array.dtype.kind in "OSU":
        return "BYTES"
    if array.dtype.name == "bfloat16":
        return "BF16"
    datatype = _DATATYPES.get(array.dtype)
    if datatype is None:
        raise TritonModelException(f"tensor '{name}' has dtype {array.dtype}, which no Triton datatype stands for")
    return datatype


def _as_bytes(name: str, array: NDArray[Any]) -> NDArray[np.object_]:
    """An object array of `bytes`; text becomes UTF-8."""
    data = np.empty(array.size, dtype=np.object_)
    for index, element in enumerate(array.flat):
        if isinstance(element, bytes):
            data[index] = bytes(element)
        elif isinstance(element, str):
            data[index] = element.encode()
        else:
            raise TritonModelException(
                f"tensor '{name}' must hold bytes or str, but element {index} is {type(element).__name__}"
            )
    return data.reshape(array.shape)
