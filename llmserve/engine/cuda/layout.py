"""The CUDA engine file: what `builder.targets.cuda` writes and `runner.py` reads.

    magic | version, bytes of JSON, its CRC-32 (little endian, 4, 8, 4) | JSON | page-aligned data: binaries, tensors

The JSON is an `EngineHeader`. A kernel is a function of `kernels/` with constants and argument types; its binaries, one
for each architecture, are what the compiler made of it. Launches are in order, with arguments that are all addresses:
what changes from step to step lies in buffers. Tensors lie each on its page; offsets count from the data. They are
row-major, but weights of integers come in panels of PANEL_OUTPUTS outputs (`builder.targets.cuda.integers`).
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmserve.engine.cache_layout import CacheLayout, cache_layout
from llmserve.engine.directory.artifact import rebuild_command
from llmserve.errors import EngineFileError, NotFound, raise_problems
from llmserve.models.number_formats import CACHES, NumberFormat

MAGIC = b"LLMSCUDA"
FORMAT_VERSION = 5
PREFIX = struct.Struct("<8sIQI")  # magic, version, bytes and CRC-32 of the JSON
PAGE_BYTES = 4096
MOST_JSON_BYTES = 1 << 30
TYPES = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "int8": "*i8", "uint8": "*u8",
         "int32": "*i32"}  # of arguments  # fmt: skip
ITEM_BYTES = {dtype: np.dtype(dtype).itemsize for dtype in TYPES}
DTYPES = {type_: dtype for dtype, type_ in TYPES.items()}
PANEL_OUTPUTS = 32  # of a weight of integers
PIECE_BYTES = 16  # of an output, one behind the other
SCALE_BYTES = 4
ALIGNED_BYTES = 16  # what a thread loads at once
TILE_ROWS = 128  # products write whole tiles of rows, so buffers have that many more or fewer
LATER_FIELDS = ("state_bytes", "layer_heads")  # of the header, where they say something
MOST_GRID = ((1 << 31) - 1, 65535, 65535)  # programs, of any GPU


class Room(Enum):
    """What an argument is an address in."""

    TENSOR = "tensor"  # `name`
    BUFFER = "buffer"  # of activations, number `name`
    INPUT = "input"  # array `name` of the step's inputs: `inputs.py`
    KEYS = "keys"  # of layer `name`
    VALUES = "values"
    STATES = "states"  # of sequences, in slots
    SCRATCH = "scratch"
    LOGITS = "logits"
    CHOICE = "choice"  # array `name` of what tokens are chosen with: `choices.py`


class Address(NamedTuple):
    room: str  # of Room
    name: str = ""
    offset: int = 0  # bytes


class StepPart(Enum):
    """Launches of the body run once over the step's tokens, the others over pieces of the selected rows: the head gives
    logits, edits change them as requests want, the best are found, and draws are made where one is wanted."""

    BODY = "body"
    HEAD = "head"
    EDITS = "edits"
    BEST = "best"
    DRAWS = "draws"


class Extent(NamedTuple):
    """Of a grid: one program for each `rows` rows, or tile of attention, or `fixed` programs."""

    rows: int = 0
    fixed: int = 1
    of_tiles: bool = False

    def programs(self, num_rows: int, num_tiles: int) -> int:
        if self.of_tiles:
            return num_tiles
        return -(-num_rows // self.rows) if self.rows else self.fixed


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function, and all that it is compiled with."""

    function: str  # "linear.gated_linear": in `kernels/`
    types: tuple[tuple[str, str], ...]  # of its arguments, by name and in order: "*fp16"
    unaligned: tuple[str, ...]  # arguments whose addresses need not be multiples of 16
    constants: tuple[tuple[str, int | float | bool | str], ...]
    num_warps: int
    num_stages: int
    most_registers: int = 0  # of a thread; 0: what the compiler finds best
    half_on: tuple[str, ...] = ()  # architectures where half as many warps have registers enough


class Launch(NamedTuple):
    kernel: int
    arguments: tuple[Address, ...]
    grid: tuple[Extent, Extent, Extent]
    part: str  # of Part
    least_rows: int = 1  # for which it runs
    most_rows: int = 1 << 30


class Tactic(NamedTuple):
    """Another kernel that makes the same of the same arguments, and its grid."""

    kernel: int
    grid: tuple[Extent, Extent, Extent]


class Binary(NamedTuple):
    """What a kernel became for one architecture."""

    symbol: str
    threads: int  # of a program
    shared_bytes: int
    num_arguments: int  # behind the kernel's own, the compiler's, which are null
    offset: int
    num_bytes: int


class PlacedTensor(NamedTuple):
    name: str
    dtype: str
    rows: int
    cols: int
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        return self.rows * self.cols * ITEM_BYTES[self.dtype]


class CacheHead(NamedTuple):
    """What a cache has of the keys, or the values, of one head in one block of positions: numbers, and behind those of
    eight bits their scales (`kernels/attention_int8.py`)."""

    dtype: str
    block_size: int
    head_dim: int

    @property
    def format(self) -> NumberFormat:
        return CACHES[self.dtype]

    @property
    def scales_begin(self) -> int:
        """Bytes of the numbers."""
        num_bytes = self.block_size * self.head_dim * ITEM_BYTES[self.dtype]
        return _aligned(num_bytes) if self.format.is_rounded else num_bytes

    @property
    def key_bytes(self) -> int:
        return self.scales_begin + self._scale_bytes(self.format.num_groups(self.head_dim))

    @property
    def value_bytes(self) -> int:
        return self.scales_begin + self._scale_bytes(1)

    def _scale_bytes(self, of_position: int) -> int:
        return _aligned(SCALE_BYTES * of_position * self.block_size) if self.format.is_rounded else 0


class LayerHeads(NamedTuple):
    """Of keys and values."""

    number: int
    head_dim: int

    def plane_bytes(self, cache_dtype: str, block_size: int) -> tuple[int, int]:
        """Of a block's keys, and of its values."""
        head = CacheHead(cache_dtype, block_size, self.head_dim)
        return self.number * head.key_bytes, self.number * head.value_bytes


@dataclass(frozen=True, slots=True)
class EngineHeader:
    """What an engine file says about itself."""

    dtype: str  # of weights
    cache_dtype: str  # of keys and values
    vocab_size: int
    max_num_tokens: int
    max_batch_size: int
    max_seq_len: int
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    query_tokens: int  # of one sequence, in a tile of attention
    head_rows: int  # selected rows at a time
    scratch_bytes: int
    buffers: tuple[int, ...]  # bytes per row
    kernels: tuple[Kernel, ...]
    launches: tuple[Launch, ...]
    tactics: Mapping[int, tuple[Tactic, ...]]  # kernel -> what may be launched for it
    tensors: tuple[PlacedTensor, ...]
    binaries: Mapping[str, tuple[Binary, ...]]  # architecture -> of each kernel
    data_bytes: int
    tensors_begin: int
    data_begin: int = 0  # in the file; not in the JSON
    state_bytes: int = 0  # of a sequence, however long; 0: its keys and values are all
    layer_heads: tuple[LayerHeads, ...] = ()  # where layers differ; those above are the largest

    @property
    def kv_bytes_per_block(self) -> int:
        return sum(keys + values for keys, values in self.plane_bytes)

    @property
    def plane_bytes(self) -> tuple[tuple[int, int], ...]:
        """Of a block's keys, and values, in each layer."""
        layers = self.layer_heads or (LayerHeads(self.num_kv_heads, self.head_dim),) * self.num_layers
        return tuple(layer.plane_bytes(self.cache_dtype, self.block_size) for layer in layers)

    @property
    def max_blocks(self) -> int:
        """Of a sequence."""
        return -(-self.max_seq_len // self.block_size)

    @property
    def weight_bytes(self) -> int:
        """Of all tensors, with what lies between them."""
        return self.data_bytes - self.tensors_begin

    def cache_layout(self, *, keeps_all: bool = False) -> CacheLayout:
        """`keeps_all`: windows are no reason to give blocks back. Nor are they where layers have other heads: blocks
        are equally large, and kernels know how large."""
        reads = () if keeps_all or self.layer_heads else self._cache_reads()
        return cache_layout(reads, self.num_layers, self.kv_bytes_per_block, self.max_seq_len, self.block_size)

    def _cache_reads(self) -> Iterator[tuple[int, int]]:
        """Layer and window (0: none) of each launch of attention."""
        for launch in self.launches:
            window = dict(self.kernels[launch.kernel].constants).get("WINDOW")
            layers = {int(argument.name) for argument in launch.arguments if argument.room == Room.KEYS.value}
            yield from ((layer, int(window)) for layer in layers if window is not None)

    def encode(self) -> bytes:
        """Everything in the file before the data."""
        fields = {name: value for name, value in asdict(self).items() if name not in LATER_FIELDS or value}
        del fields["data_begin"]
        text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        blob = PREFIX.pack(MAGIC, FORMAT_VERSION, len(text), zlib.crc32(text)) + text
        return blob.ljust(_on_page(len(blob)), b"\0")


def placed_tensors(tensors: Iterable[PlacedTensor], begin: int) -> tuple[tuple[PlacedTensor, ...], int]:
    """Each on its page, in order, from `begin` on; and where the last one ends."""
    placed, end = [], begin
    for tensor in tensors:
        offset = _on_page(end)
        placed.append(tensor._replace(offset=offset))
        end = offset + tensor.num_bytes
    return tuple(placed), end


def read_header(path: Path) -> EngineHeader:
    """`EngineFileError` when the file is damaged, foreign, or of another version, or says what cannot be."""
    from llmserve.engine.cuda.layout_checks import problems  # which imports this file

    try:
        with path.open("rb") as file:
            prefix, size = file.read(PREFIX.size), path.stat().st_size
            num_bytes, checksum = _checked_prefix(path, prefix, size)
            text = file.read(num_bytes)
    except FileNotFoundError as error:
        raise NotFound(f"{path}: no such engine file") from error
    except OSError as error:
        raise EngineFileError(f"{path} cannot be read: {error}") from error
    if len(text) != num_bytes or zlib.crc32(text) != checksum:
        raise EngineFileError(f"{path} has a damaged header (checksum); build the engine again")
    header = replace(_decoded(path, text), data_begin=_on_page(PREFIX.size + num_bytes))
    raise_problems(EngineFileError, f"{path} has an invalid header; build the engine again", problems(header))
    if (wanted := header.data_begin + header.data_bytes) != size:
        raise EngineFileError(f"{path} has {size} bytes instead of {wanted}: truncated or damaged")
    return header


def _checked_prefix(path: Path, prefix: bytes, size: int) -> tuple[int, int]:
    """Bytes and checksum of the JSON."""
    if len(prefix) < PREFIX.size:
        raise EngineFileError(f"{path} is too short for an engine file; build the engine again")
    magic, version, num_bytes, checksum = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise EngineFileError(f"{path} is not an engine file for CUDA")
    if version != FORMAT_VERSION:
        raise EngineFileError(
            f"{path} has format version {version}, but this llmserve reads {FORMAT_VERSION}; update the older one, or "
            f"rebuild with: {rebuild_command(path.parent)}"
        )
    if num_bytes > min(size, MOST_JSON_BYTES):
        raise EngineFileError(f"{path} is truncated or damaged: its header is longer than the file")
    return num_bytes, checksum


def _decoded(path: Path, text: bytes) -> EngineHeader:
    try:
        fields: dict[str, Any] = json.loads(text)
        fields["buffers"] = tuple(fields["buffers"])
        fields["kernels"] = tuple(kernel_of(kernel) for kernel in fields["kernels"])
        fields["launches"] = tuple(_launch(launch) for launch in fields["launches"])
        fields["tactics"] = {int(kernel): tuple(map(_tactic, found)) for kernel, found in fields["tactics"].items()}
        fields["tensors"] = tuple(PlacedTensor(*tensor) for tensor in fields["tensors"])
        fields["binaries"] = {gpu: tuple(Binary(*each) for each in found) for gpu, found in fields["binaries"].items()}
        fields["layer_heads"] = tuple(LayerHeads(*each) for each in fields.get("layer_heads", ()))
        return EngineHeader(**fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise EngineFileError(f"{path} has a header that cannot be read; build the engine again: {error}") from error


def kernel_of(fields: dict[str, Any]) -> Kernel:
    """From what JSON has made of one."""
    pairs = {name: tuple((key, value) for key, value in fields[name]) for name in ("types", "constants")}
    names = {name: tuple(fields[name]) for name in ("unaligned", "half_on")}
    return Kernel(**{**fields, **pairs, **names})


def _launch(values: Sequence[Any]) -> Launch:
    kernel, arguments, grid, *rest = values
    return Launch(kernel, tuple(Address(*each) for each in arguments), _grid(grid), *rest)


def _tactic(values: Sequence[Any]) -> Tactic:
    kernel, grid = values
    return Tactic(kernel, _grid(grid))


def _grid(values: Sequence[Any]) -> tuple[Extent, Extent, Extent]:
    x, y, z = (Extent(*extent) for extent in values)
    return x, y, z


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _on_page(begin: int) -> int:
    return -(-begin // PAGE_BYTES) * PAGE_BYTES
