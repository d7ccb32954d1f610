"""Converts raw little-endian tensor bytes, which both protocols use, to and from `Tensor`.

A BYTES tensor is a sequence of elements, each a 4-byte little-endian length and that many bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmserve.errors import InvalidArgument
from llmserve.frontends.shared.data_source import TEXT_BYTES, DataSource
from llmserve.serving.types import NUMPY_DTYPES, Tensor
from llmserve.wire.event_loop import INLINE_BYTES
from llmserve.wire.pieces import BLOCK_BYTES, copied

LENGTH = struct.Struct("<I")
FULL_BUFFER = "Please make sure the string length indicator is in one buffer."
MAX_RANK = 64  # numpy's limit
PIECE_TEXTS = 16 * 1024  # elements copied in one call, which holds the GIL
Raw: TypeAlias = bytes | memoryview
MAX_ELEMENTS = 2**63 - 1


class WrongSize(InvalidArgument):
    """The size of an input's data does not match its shape."""


def element_count(name: str, shape: Sequence[int], *, model: str) -> int:
    """The number of elements of a client's shape. The cost is bounded for long shapes and large numbers."""
    where = f"input '{name}' for model '{model}'"
    if len(shape) > MAX_RANK:
        refuse_rank(name, len(shape), model=model)
    if min(shape, default=0) < 0:
        raise InvalidArgument(f"{where} has a negative dimension in its shape {list(shape)}")
    count = 0 if 0 in shape else 1
    for dim in shape:
        count *= dim
        if count > MAX_ELEMENTS:
            raise InvalidArgument(f"{where} has an unusable shape {list(shape)}: it has too many elements")
    return count


def refuse_rank(name: str, rank: int, *, model: str) -> NoReturn:
    raise InvalidArgument(
        f"input '{name}' for model '{model}' has an unusable shape of {rank} dimensions; the maximum is {MAX_RANK}"
    )


def shaped(name: str, datatype: str, values: NDArray[Any], shape: Sequence[int]) -> Tensor:
    """`values` as a tensor of `shape`. The caller has checked that their count fits."""
    try:
        return Tensor(name, datatype, values.reshape(tuple(shape)))
    except (ValueError, OverflowError) as error:  # too many dimensions, or one that is too large for an array
        raise InvalidArgument(f"input '{name}' has an unusable shape {list(shape)}: {error}") from error


def decode_tensor(
    name: str, datatype: str, shape: Sequence[int], raw: Raw, *, model: str, source: DataSource | None = None
) -> Tensor:
    """A tensor from its wire bytes; `datatype` must be a known name. `source` limits the tensors of a request."""
    count = element_count(name, shape, model=model)
    if datatype == "BYTES":
        if source is not None:
            source.expect_texts(name, min(count, len(raw) // LENGTH.size), len(raw))
        return shaped(name, datatype, _decode_bytes(name, raw, count, model=model), shape)
    dtype = NUMPY_DTYPES[datatype]
    if len(raw) != count * dtype.itemsize:
        raise WrongSize(
            f"input byte size mismatch for input '{name}' for model '{model}'. "
            f"Expected {count * dtype.itemsize}, got {len(raw)}"
        )
    return shaped(name, datatype, np.frombuffer(raw, dtype=dtype), shape)


def _decode_bytes(name: str, raw: Raw, count: int, *, model: str) -> NDArray[np.object_]:
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
        if len(elements) == count:
            raise WrongSize(f"unexpected number of string elements {_count_texts(raw)} {where}, expecting {count}")
        element = raw[offset : offset + length]
        elements.append(bytes(element) if length <= BLOCK_BYTES else copied(element))
        offset += length
    if len(elements) < count:
        raise WrongSize(f"expected {count} string elements {where}, got {len(elements)}")
    return object_array(elements)


def _count_texts(raw: Raw) -> int:
    num_texts = offset = 0
    while offset + LENGTH.size <= len(raw):
        offset += LENGTH.size + LENGTH.unpack_from(raw, offset)[0]
        num_texts += 1
    return num_texts


def object_array(elements: Sequence[bytes]) -> NDArray[np.object_]:
    """A flat object array of byte strings (numpy would make a fixed-width string array)."""
    array = np.empty(len(elements), dtype=np.object_)
    if len(elements) <= PIECE_TEXTS:
        array[:] = elements
        return array
    for start in range(0, len(elements), PIECE_TEXTS):
        array[start : start + PIECE_TEXTS] = elements[start : start + PIECE_TEXTS]
    return array


def encode_tensor(tensor: Tensor) -> bytes:
    """The wire bytes of a tensor."""
    if tensor.datatype != "BYTES":
        return tensor.data.tobytes()
    flat = tensor.data.reshape(-1)
    if len(flat) <= PIECE_TEXTS:
        return _encode_texts(flat.tolist())
    return b"".join([_encode_texts(flat[at : at + PIECE_TEXTS].tolist()) for at in range(0, len(flat), PIECE_TEXTS)])


def _encode_texts(texts: Sequence[bytes]) -> bytes:
    if sum(map(len, texts)) <= BLOCK_BYTES:
        return b"".join([LENGTH.pack(len(text)) + text for text in texts])
    return b"".join([part for text in texts for part in (LENGTH.pack(len(text)), text)])  # this join releases the GIL


def tensor_bytes(tensor: Tensor) -> Raw:
    """Like `encode_tensor`, but without copying numbers: they must not change while the result is in use."""
    if tensor.datatype == "BYTES":
        return encode_tensor(tensor)
    return np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8).data


def encoding_cost(tensors: Iterable[Tensor]) -> int:
    """The approximate number of bytes that encoding converts one by one: texts, not numbers."""
    return num_bytes([tensor for tensor in tensors if tensor.datatype == "BYTES"])


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """The size of tensors. For many texts it is an estimate that does not read their lengths."""
    total = 0
    for tensor in tensors:
        total += _texts_bytes(tensor.data) if tensor.datatype == "BYTES" else tensor.data.nbytes
    return total


def _texts_bytes(texts: NDArray[Any]) -> int:
    size = texts.size * TEXT_BYTES
    return size if size > INLINE_BYTES else size + sum(map(len, texts.flat))
