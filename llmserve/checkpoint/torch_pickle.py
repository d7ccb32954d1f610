"""The pickle inside a pytorch_model.bin, read without torch and without running anything.

A pickle is a program. This reader knows the few globals that a dictionary of tensors needs and refuses all others by
name, so a hostile file cannot call anything. Tensors are returned as `StoredTensor`, the place of their numbers. What
the pickle can reach is a named tuple or has no attributes, because the opcode BUILD sets the state of any object; and
every tensor is checked after the whole pickle has run.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import reprlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
NESTING_OPCODES = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET")
MAX_TUPLES = 20_000  # a tensor takes four or five
MAX_RANK = 32  # dimensions of a tensor; numpy's own limit is not lower
MAX_ELEMENTS = 2**48  # limits views with repeated elements, and strides that no element uses


class StorageType(NamedTuple):
    dtype: str


class Storage(NamedTuple):
    dtype: str
    key: str  # the archive entry data/<key>
    num_elements: int


class StoredTensor(NamedTuple):
    """A strided view of a storage; offset and stride count elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def load_tensors(pickled: bytes) -> dict[str, StoredTensor]:
    """The tensors by name. Raises CheckpointError if the pickle contains or does anything else."""
    content = unpickle(pickled)
    if not isinstance(content, dict):
        raise CheckpointError(f"contains a {type(content).__name__} instead of a dictionary of tensors")
    # the methods of `dict` itself, because a pickle may give an OrderedDict attributes that hide its own
    items = list(dict.items(content))
    for name, value in items:
        if not isinstance(name, str) or not isinstance(value, StoredTensor):
            raise CheckpointError(f"entry {reprlib.repr(name)} is not a tensor; save model.state_dict() only")
        problem = _problem(value)
        if problem:
            raise CheckpointError(f"is damaged: tensor {reprlib.repr(name)} {problem}")
    return dict(items)


def _problem(tensor: StoredTensor) -> str:
    """The problem with a tensor whose fields may have any value; empty if it is a view inside its storage."""
    storage = tensor.storage
    if not isinstance(storage, Storage) or storage.dtype not in STORAGE_DTYPES.values():
        return "has no storage of a known type"
    if not isinstance(storage.key, str) or not _is_count(storage.num_elements):
        return "has a storage without a name or a size"
    shape, stride = tensor.shape, tensor.stride
    if not all(map(_is_count, (tensor.offset, *shape, *stride))):
        return "has an offset, a shape or a stride with values that are not counts"
    if len(shape) != len(stride) or len(shape) > MAX_RANK:
        return f"has a shape of {len(shape)} and a stride of {len(stride)} dimensions; at most {MAX_RANK} are allowed"
    if math.prod(filter(None, shape)) > MAX_ELEMENTS:
        return f"has more than {MAX_ELEMENTS} elements"
    last = tensor.offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if 0 not in shape and last >= storage.num_elements:
        return f"reaches element {last} of a storage of {storage.num_elements}"
    return ""


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_ELEMENTS


def unpickle(pickled: bytes) -> object:
    """Returns plain values and `StoredTensor`s. Raises CheckpointError for anything else."""
    try:
        _check_program(pickled)
        return _TensorUnpickler(io.BytesIO(pickled)).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged or hostile pickle can make the unpickler fail in any way
        raise CheckpointError(f"has a damaged pickle: {type(error).__name__}: {error}") from error


def _check_program(pickled: bytes) -> None:
    """Refuse opcodes that no honest pickle has and that would end the process instead of raising an error.

    For a memo index, the unpickler allocates memory for all lower ones. For a dictionary's key, Python computes a hash
    of nested tuples, and only the end of the stack limits the depth.
    """
    num_tuples = 0
    for opcode, argument, _ in pickletools.genops(pickled):
        num_tuples += opcode.name in NESTING_OPCODES
        if num_tuples > MAX_TUPLES:
            raise ValueError(f"more than {MAX_TUPLES} tuples")
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and isinstance(argument, int) and argument > len(pickled):
            raise ValueError(f"memo index {argument} in a pickle of {len(pickled)} bytes")


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The known globals, as llmserve's own stand-ins; nothing is ever imported."""
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
        kind, storage_type, key, _location, num_elements, *views = pid  # a view of a storage: torch before 0.4
        known = kind == "storage" and isinstance(storage_type, StorageType) and isinstance(key, str)
        if not known or views not in ([], [None]) or not _is_count(num_elements):
            raise ValueError(f"unknown persistent id {reprlib.repr(pid)}")
        return Storage(storage_type.dtype, key, num_elements)

    def _globals(self) -> Mapping[tuple[str, str], Callable[..., Any]]:
        return {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor"): _RebuildTensor(),
            ("torch._utils", "_rebuild_tensor_v2"): _RebuildTensor(),
            ("torch._utils", "_rebuild_parameter"): _RebuildParameter(),
        }


class _RebuildTensor:
    __slots__ = ()  # a function would accept attributes from the pickle, and keep them

    def __call__(self, storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
        return StoredTensor(storage, offset, tuple(shape), tuple(stride))


class _RebuildParameter:
    __slots__ = ()

    def __call__(self, data: Any, *_: Any) -> StoredTensor:
        if not isinstance(data, StoredTensor):
            raise ValueError("a parameter without a tensor")
        return data
