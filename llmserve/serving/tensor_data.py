"""Tensors that do not come from a client: zeros, random values, and the contents of files.

Files contain elements one after the other, little endian, without the shape. A BYTES element is a four-byte length,
then the bytes.
"""

from __future__ import annotations

import math
import string
import struct
from collections.abc import Sequence

import numpy as np

from llmserve.serving.types import NUMPY_DTYPES, Tensor

RANDOM_INTEGERS = 128  # random integers are below this: they are often indices
RANDOM_TEXT_BYTES = 8


def zero_tensor(name: str, datatype: str, shape: Sequence[int]) -> Tensor:
    """A tensor of zeros, or of empty strings."""
    if datatype == "BYTES":
        return Tensor(name, datatype, np.full(shape, b"", np.object_))
    return Tensor(name, datatype, np.zeros(shape, NUMPY_DTYPES[datatype]))


def random_tensor(name: str, datatype: str, shape: Sequence[int], random: np.random.Generator) -> Tensor:
    """A tensor of floats from 0 to 1, of small integers, or of strings of letters."""
    dtype = NUMPY_DTYPES[datatype]
    if datatype == "BYTES":
        letters = random.choice(list(string.ascii_letters.encode()), (math.prod(shape), RANDOM_TEXT_BYTES))
        data = np.empty(len(letters), np.object_)
        data[:] = [bytes(row.tolist()) for row in letters]
        return Tensor(name, datatype, data.reshape(shape))
    if datatype == "BF16":
        bits = random.random(shape, np.float32).view(np.uint32) >> 16  # a bfloat16 is the upper half of a float
        return Tensor(name, datatype, bits.astype(np.uint16))
    if datatype == "BOOL":
        return Tensor(name, datatype, random.integers(0, 2, shape).astype(dtype))
    if dtype.kind == "f":
        return Tensor(name, datatype, random.random(shape).astype(dtype))
    return Tensor(name, datatype, random.integers(0, RANDOM_INTEGERS, shape).astype(dtype))


def tensor_from_bytes(name: str, datatype: str, shape: Sequence[int], data: bytes) -> Tensor:
    """Read a tensor from the content of a file. Raises `ValueError` if `data` is not exactly such a tensor."""
    count = math.prod(shape)
    if datatype == "BYTES":
        texts = np.empty(count, np.object_)
        texts[:] = _texts(data, count)
        return Tensor(name, datatype, texts.reshape(shape))
    dtype = NUMPY_DTYPES[datatype]
    if len(data) != count * dtype.itemsize:
        raise ValueError(f"expected {count * dtype.itemsize} bytes for {count} elements of {datatype}, got {len(data)}")
    return Tensor(name, datatype, np.frombuffer(data, dtype).reshape(shape))


def _texts(data: bytes, count: int) -> list[bytes]:
    texts = []
    position = 0
    while position < len(data):
        if position + 4 > len(data):
            raise ValueError("the length of a string is truncated")
        (length,) = struct.unpack_from("<I", data, position)
        position += 4
        if position + length > len(data):
            raise ValueError("a string is truncated")
        texts.append(data[position : position + length])
        position += length
    if len(texts) != count:
        raise ValueError(f"expected {count} strings, got {len(texts)}")
    return texts
