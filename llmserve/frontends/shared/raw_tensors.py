"""Raw little-endian tensor bytes, as both protocols carry them, to and from `Tensor`.

A BYTES tensor is a run of elements, each a 4-byte little-endian length and that many bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.errors import InvalidArgument
from llmserve.serving.types import NUMPY_DTYPES, Tensor

LENGTH = struct.Struct("<I")
FULL_BUFFER = "Please make sure the string length indicator is in one buffer."
MAX_RANK = 64  # numpy's
MAX_ELEMENTS = 2**63 - 1


class WrongSize(InvalidArgument):
    """An input's data is not as long as its shape says."""


def element_count(name: str, shape: Sequence[int], *, model: str) -> int:
    """Number of elements of a shape that came from the wire: cheap, however long the shape and large its numbers."""
    where = f"input '{name}' for model '{model}'"
    if len(shape) > MAX_RANK:
        raise InvalidArgument(
            f"{where} has an unusable shape of {len(shape)} dimensions; at most {MAX_RANK} are possible"
        )
    if min(shape, default=0) < 0:
        raise InvalidArgument(f"{where} has a negative dimension in its shape {list(shape)}")
    count = 0 if 0 in shape else 1
    for dim in shape:
        count *= dim
        if count > MAX_ELEMENTS:
            raise InvalidArgument(f"{where} has an unusable shape {list(shape)}: no tensor has that many elements")
    return count


def shaped(name: str, datatype: str, values: NDArray[Any], shape: Sequence[int]) -> Tensor:
    """`values`, whose count is already known to fit, as a tensor of `shape`."""
    try:
        return Tensor(name, datatype, values.reshape(tuple(shape)))
    except (ValueError, OverflowError) as error:  # too many dimensions, or one that no array can have
        raise InvalidArgument(f"input '{name}' has an unusable shape {list(shape)}: {error}") from error


def decode_tensor(name: str, datatype: str, shape: Sequence[int], raw: bytes, *, model: str) -> Tensor:
    """A tensor from its wire bytes; `datatype` must be a known name."""
    count = element_count(name, shape, model=model)
    if datatype == "BYTES":
        return shaped(name, datatype, _decode_bytes(name, raw, count, model=model), shape)
    dtype = NUMPY_DTYPES[datatype]
    if len(raw) != count * dtype.itemsize:
        raise WrongSize(
            f"input byte size mismatch for input '{name}' for model '{model}'. "
            f"Expected {count * dtype.itemsize}, got {len(raw)}"
        )
    return shaped(name, datatype, np.frombuffer(raw, dtype=dtype), shape)


def _decode_bytes(name: str, raw: bytes, count: int, *, model: str) -> NDArray[np.object_]:
    where = f"for inference input '{name}' for model '{model}'"
    elements: list[bytes] = []
    offset = 0
    while offset < len(raw):
        if offset + LENGTH.size > len(raw):
            raise WrongSize(
                f"incomplete string length indicator {where}, expecting 4 bytes but only {len(raw) - offset} bytes "
                f"available. {FULL_BUFFER}"
            )
        (length,) = LENGTH.unpack_from(raw, offset)
        offset += LENGTH.size
        if offset + length > len(raw):
            raise InvalidArgument(
                f"incomplete string data for inference input '{name}', expecting string of length {length} but only "
                f"{len(raw) - offset} bytes available"
            )
        elements.append(raw[offset : offset + length])
        offset += length
    if len(elements) > count:
        raise WrongSize(f"unexpected number of string elements {len(elements)} {where}, expecting {count}")
    if len(elements) < count:
        raise WrongSize(f"expected {count} string elements {where}, got {len(elements)}")
    return object_array(elements)


def object_array(elements: Sequence[bytes]) -> NDArray[np.object_]:
    """A flat object array of byte strings (numpy would make a fixed-width string array)."""
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array


def encode_tensor(tensor: Tensor) -> bytes:
    """The wire bytes of a tensor."""
    if tensor.datatype != "BYTES":
        return tensor.data.tobytes()
    return b"".join(LENGTH.pack(len(element)) + element for element in tensor.data.flat)
