"""The header of a GGUF file: metadata and the tensors' places. All of it is checked before a weight is read.

Layout: "GGUF", version, number of tensors, number of metadata entries, the entries, the tensors' descriptions, padding
to `general.alignment`, data. Offsets count from the start of the data, and are multiples of the alignment.
"""

from __future__ import annotations

import math
import mmap
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmserve.checkpoint.gguf.block_types import SUPPORTED, TYPES, BlockType, type_name
from llmserve.checkpoint.gguf.cursor import MAX_STRINGS, Cursor
from llmserve.errors import CheckpointError, raise_problems

Scalar: TypeAlias = bool | int | float | str
Metadata: TypeAlias = Mapping[str, Scalar | list[str] | NDArray[Any]]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_HEADER_BYTES = 1 << 28  # real headers have up to 20 MB, nearly all of it the tokenizer
MAX_ENTRIES = 1 << 16  # number of metadata entries, and of tensors
MAX_KEY_BYTES = (1 << 16) - 1
MAX_RANK = 4
MAX_LISTED = 20

BOOL, STRING, ARRAY = 7, 8, 9
NUMBERS: Mapping[int, struct.Struct] = {  # value types of a fixed size
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    BOOL: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
FLOAT32 = 6


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A tensor in the file's own format."""

    kind: BlockType
    shape: tuple[int, ...]  # rows first; the file has the reverse order
    offset: int  # from the start of the file
    num_bytes: int
    part: int = 0  # which of the checkpoint's files has it


@dataclass(frozen=True, slots=True)
class Header:
    version: int
    metadata: Metadata
    tensors: Mapping[str, StoredBlocks]


def read_header(data: mmap.mmap) -> Header:
    """Raises CheckpointError, without the file's name, if anything in it is wrong."""
    cursor = Cursor(data, min(len(data), MAX_HEADER_BYTES))
    version = _read_version(cursor)
    num_tensors = cursor.count("tensors", 24, MAX_ENTRIES)
    num_entries = cursor.count("metadata entries", 13, MAX_ENTRIES)
    metadata = _read_metadata(cursor, num_entries)
    described = _read_descriptions(cursor, num_tensors)
    start = _data_start(metadata, cursor.position)
    problems = _unsupported_types({name: type_id for name, (type_id, _, _) in described.items()})
    tensors: dict[str, StoredBlocks] = {}
    for name, (type_id, shape, offset) in described.items():
        kind = TYPES.get(type_id)
        if kind is None:
            continue  # reported above, with other tensors of its type
        if found := _shape_problem(kind, shape):
            problems.append(f"tensor {name} {found}")
            continue
        num_bytes = math.prod(shape) // kind.num_elements * kind.num_bytes
        tensors[name] = StoredBlocks(kind, shape, start + offset, num_bytes)
    problems += _place_problems(tensors, start, len(data), _alignment(metadata))
    if len(problems) > MAX_LISTED:
        problems[MAX_LISTED:] = [f"... and {len(problems) - MAX_LISTED} more"]
    raise_problems(CheckpointError, "its tensors cannot be read", problems)
    return Header(version, metadata, tensors)


def _read_version(cursor: Cursor) -> int:
    magic = cursor.bytes(4) if cursor.remaining >= 4 else b""
    if magic != MAGIC:
        raise CheckpointError(f"it begins with {magic!r} instead of {MAGIC!r}: it is not a GGUF file")
    version = cursor.uint32()
    if version and version & 0xFFFF == 0:  # a small number's bytes in reverse order
        raise CheckpointError(
            "it was written for big-endian machines; convert it with `gguf-convert-endian FILE little` of the gguf "
            "package, or download the little-endian file"
        )
    if version not in VERSIONS:
        raise CheckpointError(
            f"it has format version {version}, but only {' and '.join(map(str, VERSIONS))} are supported; convert "
            "the original model again with a current llama.cpp"
        )
    return version


def _read_metadata(cursor: Cursor, count: int) -> dict[str, Scalar | list[str] | NDArray[Any]]:
    metadata: dict[str, Scalar | list[str] | NDArray[Any]] = {}
    for _ in range(count):
        key = cursor.text()
        if not 0 < len(key) <= MAX_KEY_BYTES:
            raise CheckpointError(f"a metadata key before byte {cursor.position} has {len(key)} characters")
        if key in metadata:
            raise CheckpointError(f"metadata key {key} appears twice")
        try:
            metadata[key] = _read_value(cursor, cursor.uint32())
        except CheckpointError as error:
            raise CheckpointError(f"metadata {reprlib.repr(key)}: {error}") from error
    return metadata


def _read_value(cursor: Cursor, kind: int) -> Scalar | list[str] | NDArray[Any]:
    if kind == STRING:
        return cursor.text()
    if kind == ARRAY:
        return _read_array(cursor)
    if kind not in NUMBERS:
        raise CheckpointError(f"its value has the unknown type {kind}: the file is damaged")
    value = cursor.unpack(NUMBERS[kind])
    if kind == BOOL:
        if value not in (0, 1):
            raise CheckpointError(f"{value} is not a boolean: the file is damaged")
        return bool(value)
    # the shortest decimal for this float32, which the converter was given (1e-05, not 9.999999747378752e-06)
    return float(str(np.float32(value))) if kind == FLOAT32 else value


def _read_array(cursor: Cursor) -> list[str] | NDArray[Any]:
    kind = cursor.uint32()
    if kind == STRING:
        return cursor.texts(cursor.count("strings", 8, MAX_STRINGS))
    if kind not in NUMBERS:
        raise CheckpointError(f"it is an array of type {kind}, which is not supported; use numbers or strings")
    layout = NUMBERS[kind]
    count = cursor.count("numbers", layout.size, MAX_HEADER_BYTES)
    dtype = np.dtype(np.bool_) if kind == BOOL else np.dtype(layout.format)
    return np.frombuffer(cursor.bytes(count * layout.size), dtype)


def _read_descriptions(cursor: Cursor, count: int) -> dict[str, tuple[int, tuple[int, ...], int]]:
    """Type, shape and offset (from the start of the data) by name."""
    described: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for _ in range(count):
        name = cursor.text()
        rank = cursor.uint32()
        if not 1 <= rank <= MAX_RANK:
            raise CheckpointError(f"tensor {reprlib.repr(name)} has {rank} dimensions; 1 to {MAX_RANK} are allowed")
        if name in described:
            raise CheckpointError(f"tensor {reprlib.repr(name)} appears twice")
        shape = tuple(cursor.uint64() for _ in range(rank))[::-1]
        described[name] = cursor.uint32(), shape, cursor.uint64()
    return described


def _alignment(metadata: Metadata) -> int:
    """A power of two, at least 8, so that every number is aligned for the processor."""
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        raise CheckpointError(f"general.alignment must be a power of two and at least 8, got {alignment!r}")
    return alignment


def _data_start(metadata: Metadata, position: int) -> int:
    alignment = _alignment(metadata)
    return -(-position // alignment) * alignment


def _shape_problem(kind: BlockType, shape: tuple[int, ...]) -> str:
    if 0 in shape:
        return f"has no elements: its shape is {list(shape)}"
    if shape[-1] % kind.num_elements:
        return f"has rows of {shape[-1]} elements, but a block of {kind.name} has {kind.num_elements}"
    return ""


def _unsupported_types(types: Mapping[str, int]) -> list[str]:
    """One problem for each unsupported type."""
    problems = []
    for type_id in sorted(set(types.values()) - TYPES.keys()):
        names = [name for name, each in types.items() if each == type_id]
        tensors = f"tensor {names[0]} has" if len(names) == 1 else f"tensor {names[0]} and {len(names) - 1} more have"
        problems.append(
            f"{tensors} the type {type_name(type_id)}, which is not supported; supported: {SUPPORTED}. Use a file of "
            "the model in one of these, such as Q4_K_M, Q8_0 or F16"
        )
    return problems


def _place_problems(tensors: Mapping[str, StoredBlocks], start: int, file_bytes: int, alignment: int) -> list[str]:
    problems = []
    end, before = start, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if (tensor.offset - start) % alignment:
            problems.append(f"tensor {name} begins at byte {tensor.offset}, which is not aligned to {alignment} bytes")
        if tensor.offset < end:
            problems.append(f"tensor {name} overlaps {before}")
        if tensor.offset + tensor.num_bytes > file_bytes:
            problems.append(
                f"tensor {name} ends at byte {tensor.offset + tensor.num_bytes}, but the file has {file_bytes}: it is "
                "cut short; download it again"
            )
        end, before = tensor.offset + tensor.num_bytes, name
    return problems
