"""The pickle inside a pytorch_model.bin, read without torch and without running anything.

A pickle is a program. This reader knows the handful of globals that a dictionary of tensors needs and refuses every
other by name, so a hostile file cannot call anything. Tensors come out as `StoredTensor`: where their numbers lie.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import reprlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmserve.errors import CheckpointError

STORAGE_DTYPES: Mapping[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


@dataclass(frozen=True, slots=True)
class StorageType:
    dtype: str


@dataclass(frozen=True, slots=True)
class Storage:
    dtype: str
    key: str  # the archive entry data/<key>
    num_elements: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A strided view of a storage; offset and stride count elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def load_tensors(pickled: bytes) -> dict[str, StoredTensor]:
    """The tensors by name. Raises CheckpointError when the pickle holds, or does, anything else."""
    content = _unpickle(pickled)
    if not isinstance(content, dict):
        raise CheckpointError(f"holds a {type(content).__name__} instead of a dictionary of tensors")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, StoredTensor):
            raise CheckpointError(f"entry {reprlib.repr(name)} is not a tensor; save model.state_dict() only")
    return dict(content)


def _unpickle(pickled: bytes) -> object:
    try:
        _check_memo(pickled)
        return _TensorUnpickler(io.BytesIO(pickled)).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged or hostile pickle can make the unpickler fail in any way
        raise CheckpointError(f"holds a damaged pickle: {type(error).__name__}: {error}") from error


def _check_memo(pickled: bytes) -> None:
    """Refuse memo indices that no honest pickle has: the unpickler would allocate room for all the lower ones."""
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and isinstance(argument, int) and argument > len(pickled):
            raise ValueError(f"memo index {argument} in a pickle of {len(pickled)} bytes")


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The globals we know, by our own stand-ins; nothing is ever imported."""
        if module == "torch" and name in STORAGE_DTYPES:
            return StorageType(STORAGE_DTYPES[name])
        found = self._globals().get((module, name))
        if found is None:
            raise CheckpointError(
                f"refused: the pickle asks for {module}.{name}, which a dictionary of tensors does not need; "
                "nothing was run. Convert the checkpoint to safetensors if you trust it"
            )
        return found

    def persistent_load(self, pid: Any) -> Storage:
        kind, storage_type, key, _location, num_elements = pid
        if kind != "storage" or not isinstance(storage_type, StorageType) or not isinstance(key, str):
            raise ValueError(f"unknown persistent id {reprlib.repr(pid)}")
        return Storage(storage_type.dtype, key, _count(num_elements))

    def _globals(self) -> Mapping[tuple[str, str], Callable[..., Any]]:
        return {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_parameter"): self._parameter,
        }

    def _tensor(self, storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
        if not isinstance(storage, Storage) or len(shape) != len(stride):
            raise ValueError("a tensor without a storage, or with a shape and a stride of different lengths")
        tensor = StoredTensor(storage, _count(offset), tuple(map(_count, shape)), tuple(map(_count, stride)))
        if 0 not in tensor.shape:
            last = tensor.offset + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
            if last >= storage.num_elements:
                raise ValueError(f"a tensor reaches element {last} of a storage of {storage.num_elements}")
        return tensor

    def _parameter(self, data: Any, *_: Any) -> StoredTensor:
        if not isinstance(data, StoredTensor):
            raise ValueError("a parameter without a tensor")
        return data


def _count(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a count, got {reprlib.repr(value)}")
    return value
