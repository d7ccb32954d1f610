"""The parts of DLPack that numpy does not support: bfloat16, and tensors on a GPU.

A bfloat16 tensor is passed as bit patterns in uint16, with the capsule's type byte changed.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

CPU = (1, 0)  # DLPack's device type and number
_UINT, _BFLOAT = 1, 4
_LEGACY, _VERSIONED = b"dltensor", b"dltensor_versioned"
_VERSIONED_HEADER_BYTES = 32  # version, manager context, deleter, flags; then the DLTensor of both forms


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
    ]


class _Held:
    """A bare capsule, in the form that consumers expect."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU


def array_to_capsule(array: NDArray[Any], *, is_bfloat16: bool) -> Any:
    """A capsule that shares the array's memory."""
    capsule = (array if array.flags.writeable else array.copy()).__dlpack__()
    if is_bfloat16:
        _description(capsule).type_code = _BFLOAT
    return capsule


def array_from(source: Any) -> tuple[NDArray[Any], bool]:
    """The array of a tensor or a capsule, and whether it has bit patterns of bfloat16. Copies only from a GPU.

    Raises numpy's errors for unsupported capsules.
    """
    capsule = _cpu_capsule(source)
    described = _description(capsule)
    is_bfloat16 = (described.type_code, described.type_bits) == (_BFLOAT, 16)
    if is_bfloat16:
        described.type_code = _UINT
    return np.from_dlpack(_Held(capsule)), is_bfloat16


def _cpu_capsule(source: Any) -> Any:
    if hasattr(source, "__dlpack_device__") and source.__dlpack_device__()[0] == CPU[0]:
        return source.__dlpack__()
    is_capsule = not hasattr(source, "__dlpack__")
    if is_capsule and _description(source).device_type == CPU[0]:
        return source
    torch = sys.modules.get("torch")  # code with a GPU tensor has most likely loaded it
    if torch is None:
        raise BufferError("it is not in CPU memory; copy it there first")
    return torch.from_dlpack(_Held(source) if is_capsule else source).cpu().__dlpack__()


def _description(capsule: Any) -> _DLTensor:
    is_valid = ctypes.pythonapi.PyCapsule_IsValid
    is_valid.argtypes, is_valid.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.argtypes, pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    for name, offset in ((_LEGACY, 0), (_VERSIONED, _VERSIONED_HEADER_BYTES)):
        if is_valid(capsule, name):
            return _DLTensor.from_address(pointer(capsule, name) + offset)
    raise TypeError("it is not a DLPack tensor, or was already consumed")
