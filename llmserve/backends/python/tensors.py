"""`pb_utils.Tensor`: a tensor as models use it.

A model may change its input arrays and reuse its output arrays, so both are copied when necessary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.backends.python import dlpack
from llmserve.backends.python.errors import TritonModelException
from llmserve.serving import types as wire

_DATATYPES = {dtype: name for name, dtype in wire.NUMPY_DTYPES.items() if name not in ("BF16", "BYTES")}


class Tensor:
    __slots__ = ("_array", "_datatype", "_is_borrowed", "_name")

    def __init__(self, name: str, array: NDArray[Any]) -> None:
        if not isinstance(name, str):
            raise TypeError(f"the name of a tensor must be str, got {type(name).__name__}")
        if not isinstance(array, np.ndarray):
            raise TypeError(f"tensor '{name}' must be made from a numpy array, got {type(array).__name__}")
        self._name = name
        self._array = array
        self._datatype = _datatype(name, array)
        self._is_borrowed = False

    @classmethod
    def borrow(cls, tensor: wire.Tensor) -> Tensor:
        """A tensor whose array belongs to the server and must not be changed."""
        self = cls.own(tensor)
        self._is_borrowed = True
        return self

    @classmethod
    def own(cls, tensor: wire.Tensor) -> Tensor:
        """A tensor whose array the model may keep."""
        self = cls.__new__(cls)
        self._name, self._array, self._datatype, self._is_borrowed = tensor.name, tensor.data, tensor.datatype, False
        return self

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """From a tensor that supports DLPack, or its capsule; no copy if it is in CPU memory."""
        try:
            array, is_bfloat16 = dlpack.array_from(tensor)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TritonModelException(f"tensor '{name}' cannot be read through DLPack: {error}") from error
        made = Tensor(name, array)
        if is_bfloat16:
            made._datatype = "BF16"
        return made

    def name(self) -> str:
        return self._name

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def triton_dtype(self) -> str:
        return self._datatype

    def is_cpu(self) -> bool:
        return True

    def as_numpy(self) -> NDArray[Any]:
        """The model's own array."""
        if self._datatype == "BF16" and self._array.dtype == np.uint16:
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
            )
        return self._own()

    def to_dlpack(self) -> Any:
        """A DLPack capsule of the model's own array."""
        if self._datatype == "BYTES":
            raise TritonModelException(f"tensor '{self._name}' holds strings, which DLPack does not support")
        array = self._own()
        if self._datatype == "BF16":
            return dlpack.array_to_capsule(array.view(np.uint16), is_bfloat16=True)
        return dlpack.array_to_capsule(array, is_bfloat16=False)

    def __dlpack__(self, **options: Any) -> Any:
        """`options` are for devices other than the CPU."""
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU

    def _own(self) -> NDArray[Any]:
        if self._is_borrowed:
            self._array, self._is_borrowed = self._array.copy(), False
        return self._array

    def to_wire(self, *, copy: bool = True) -> wire.Tensor:
        """What the server gets. A copy can no longer be changed by the model; without one it may be its own array."""
        array = self._array
        if self._is_borrowed:
            return wire.Tensor(self._name, self._datatype, array)
        if self._datatype == "BYTES":
            return wire.Tensor(self._name, self._datatype, _as_bytes(self._name, array))
        bits = array.view(np.uint16) if self._datatype == "BF16" else array
        data = np.array(bits, order="C") if copy else np.asarray(bits, order="C")  # both drop masks and the like
        return wire.Tensor(self._name, self._datatype, data)


def _datatype(name: str, array: NDArray[Any]) -> str:
    if array.dtype.kind in "OSU":
        return "BYTES"
    if array.dtype.name == "bfloat16":
        return "BF16"
    datatype = _DATATYPES.get(array.dtype)
    if datatype is None:
        raise TritonModelException(f"tensor '{name}' has dtype {array.dtype}, which has no Triton datatype")
    return datatype


def _as_bytes(name: str, array: NDArray[Any]) -> NDArray[np.object_]:
    """An object array of `bytes`: text becomes UTF-8, anything else its `str`, as in Triton."""
    data = np.empty(array.size, dtype=np.object_)
    for index, element in enumerate(array.flat):
        if isinstance(element, bytes):
            data[index] = bytes(element)
            continue
        try:
            data[index] = str(element).encode()
        except Exception as error:  # border: the `str` of a model's own object, which may also not be valid UTF-8
            raise TritonModelException(f"element {index} of tensor '{name}' cannot be made text: {error}") from error
    return data.reshape(array.shape)
