"""The CPU engine file as records: what `builder.targets.cpu.target` writes, and `kernels/format.h` reads.

    FileHeader | op records | tensor records | buffer records | JSON | page-aligned tensors

Little endian. Tensors are row-major; weights of linear layers are packed in panels of 32 outputs (the order is in
`kernels/format.h`), which every ISA variant reads directly. The records are for the C++ library; the JSON has the same
limits for Python.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.engine.cpu.op_codes import LINEAR_CODES
from llmserve.engine.directory.artifact import rebuild_command
from llmserve.errors import EngineFileError, NotFound
from llmserve.models.number_formats import CACHES, INT4, WEIGHTS, NumberFormat, WeightFormat

MAGIC = b"LLMSENG\n"
FORMAT_VERSION = 7
PACKING = "panels32"
PACKING_CODE = 1
PANEL_COLUMNS = 32
PAGE_BYTES = 4096
NO_TENSOR = -1
# of EngineHeader, omitted if empty
LATER_FIELDS = ("state_bytes", "output_width", "needs_whole", "hidden_width", "draft_vocab_size")


class DType(IntEnum):
    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    INT8 = 3
    INT4 = 4
    INT5 = 5
    INT6 = 6
    INT2 = 7
    INT3 = 8

    @property
    def format(self) -> WeightFormat:
        return FORMATS[self.name.lower()]


# Codes of blocks have no separate formats.
FORMATS = {**WEIGHTS, **{f"int{bits}": replace(INT4, name=f"int{bits}", bits=bits) for bits in (2, 3, 5, 6)}}
ZERO_POINT = 128  # for weights of eight bits


class Layout(IntEnum):
    ROWS = 0
    PANELS = 1


OPERAND = np.dtype([("buffer", "<i4"), ("offset", "<u4"), ("width", "<u4"), ("stride", "<u4")])
OP = np.dtype(
    [("kind", "<u4"), ("rows", "<u4"), ("inputs", OPERAND, 3), ("output", OPERAND), ("tensors", "<i4", 4)]
    + [(name, "<u4") for name in ("layer", "num_heads", "head_dim", "groups", "window", "before")]
    + [("scalar", "<f4"), ("soft_cap", "<f4")]
)
TENSOR = np.dtype([(name, "<u4") for name in ("dtype", "rows", "cols", "layout")] + [("offset", "<u8")])
BUFFER = np.dtype("<u8")  # bytes per row
HEADER = np.dtype(
    [("magic", "S8"), ("version", "<u4"), ("metadata_crc", "<u4")]
    + [(name, "<u8") for name in ("file_bytes", "metadata_bytes", "ops_offset", "tensors_offset", "buffers_offset")]
    + [("json_offset", "<u8"), ("json_bytes", "<u8")]
    + [(name, "<u4") for name in ("num_ops", "num_tensors", "num_buffers", "packing")]
    + [(name, "<u4") for name in ("vocab_size", "max_num_tokens", "max_batch_size", "max_seq_len", "block_size")]
    + [(name, "<u4") for name in ("num_layers", "num_kv_heads", "head_dim", "cache_dtype")]
    + [("mixes_heads", "<u2"), ("experts_per_token", "<u2")]
)
CRC_BEGIN = 16  # excludes magic, version and the checksum itself


@dataclass(frozen=True, slots=True)
class EngineHeader:
    """The description in an engine file."""

    dtype: str  # of unquantized weights: a key of FLOATS
    quantization: str  # a key of QUANTIZED, or empty
    cache_dtype: str  # of CACHES
    packing: str
    vocab_size: int
    max_num_tokens: int
    max_batch_size: int
    max_seq_len: int
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    activation_bytes: int  # working memory of one engine, without weights and cache
    program: str  # the traced network as text
    state_bytes: int = 0  # per sequence, of any length; 0: it only has keys and values
    output_width: int = 0  # as in RunnerInfo; likewise the next ones
    needs_whole: bool = False
    hidden_width: int = 0
    draft_vocab_size: int = 0

    @property
    def kv_bytes_per_block(self) -> int:
        heads = 2 * self.num_layers * self.num_kv_heads
        return heads * cache_bytes_per_head(self.head_dim, self.block_size, CACHES[self.cache_dtype])


def cache_bytes_per_head(head_dim: int, block_size: int, format: NumberFormat) -> int:
    """Bytes of the keys, or values, of one head in one block of one layer, as in `kernels/kv_cache.h`."""
    if not format.is_rounded:
        return _round_up(format.num_bytes(block_size * head_dim), 4)
    keys, values = _round_up(head_dim, 4) * block_size, _round_up(block_size, 4) * _round_up(head_dim, 16)
    return max(keys, values) + 4 * format.num_groups(head_dim) * block_size


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    dtype: DType
    rows: int  # 1 for a vector
    cols: int
    layout: Layout = Layout.ROWS

    @property
    def num_bytes(self) -> int:
        """Bytes in the file, including padding of panels."""
        if self.layout is Layout.ROWS:
            return self.rows * self.cols * self.dtype.format.bits // 8
        return _round_up(self.rows, PANEL_COLUMNS) * panel_depth(self.cols, self.dtype) * self.dtype.format.bits // 8


def panel_depth(cols: int, dtype: DType) -> int:
    """Inputs of a panel, a multiple of four for integers."""
    return _round_up(cols, 4) if dtype.format.is_rounded else cols


def pack_panels(rows: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """`rows` [N, K] of a weight in the order of `kernels/format.h`, padded with zeros; they must start at a panel.

    Eight-bit integers are given as int8, and have a zero point in the file; four-bit ones are given as uint8, 0 to 15.
    """
    count, cols = rows.shape
    panels, depth = -(-count // PANEL_COLUMNS), panel_depth(cols, dtype)
    if dtype is DType.INT8:
        rows = rows.view(np.uint8) + np.uint8(ZERO_POINT)
    padded = np.zeros((panels * PANEL_COLUMNS, depth), rows.dtype)
    padded[:count, :cols] = rows
    if dtype is DType.INT4:
        low, high = padded.reshape(panels, 2, PANEL_COLUMNS // 2, depth // 4, 4).transpose(1, 0, 3, 2, 4)
        return np.ascontiguousarray(low | high << 4)
    if dtype in (DType.INT2, DType.INT3, DType.INT5, DType.INT6):
        return _pack_codes(padded.reshape(panels, 2, PANEL_COLUMNS // 2, depth // 4, 4), dtype.format.bits)
    if dtype is DType.INT8:
        return np.ascontiguousarray(padded.reshape(panels, PANEL_COLUMNS, depth // 4, 4).transpose(0, 2, 1, 3))
    if dtype is DType.BFLOAT16:
        return np.ascontiguousarray(padded.reshape(panels, 2, PANEL_COLUMNS // 2, depth).transpose(0, 3, 2, 1))
    return np.ascontiguousarray(padded.reshape(panels, PANEL_COLUMNS, depth).transpose(0, 2, 1))


def _pack_codes(codes: NDArray[Any], bits: int) -> NDArray[Any]:
    """[panels, 2, 16, steps, 4]: four bits of both halves of a panel in a byte, or pairs of bits; the rest follows."""
    panels, _, _, steps, _ = codes.shape
    codes = codes.transpose(0, 3, 1, 2, 4).reshape(panels, steps, 2, 64)
    if bits < 4:
        parts = [_pack_pairs(codes & 3)]
    else:
        low = codes & 15
        parts = [low[:, :, 0] | low[:, :, 1] << 4]
    if bits % 2:
        parts.append(np.packbits(codes >> bits - 1, axis=3, bitorder="little"))
    elif bits == 6:
        parts.append(_pack_pairs(codes >> 4))
    return np.concatenate([part.reshape(panels, steps, -1) for part in parts], axis=2)


def _pack_pairs(codes: NDArray[Any]) -> NDArray[Any]:
    """[..., 64] numbers of two bits -> [..., 16] bytes."""
    pairs = codes.reshape(*codes.shape[:-1], 4, 16) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    found: NDArray[Any] = np.bitwise_or.reduce(pairs, axis=-2)
    return found


def pack_items(items: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Data of blocks, arrays [N, blocks of a row], in the order of `kernels/format.h`. The rows must start at a
    panel."""
    found = []
    for item in items:
        padded = np.zeros((_round_up(len(item), PANEL_COLUMNS), item.shape[1]), item.dtype)
        padded[: len(item)] = item
        of_panels = np.ascontiguousarray(padded.reshape(-1, PANEL_COLUMNS, item.shape[1]).transpose(0, 2, 1))
        found.append(of_panels.view(np.int8))
    return np.concatenate(found, axis=2)


def pack_groups(scales: NDArray[Any], zeros: NDArray[Any] | None) -> NDArray[Any]:
    """Data of the groups [N, groups] of a quantized weight, in the order of `kernels/format.h`: binary16 scales, or
    codes of scales and zero points side by side. The rows must start at a panel."""
    if zeros is None:
        return pack_panels(scales, DType.FLOAT16)
    codes = [pack_panels(array, DType.FLOAT16) for array in (scales, zeros)]
    return np.concatenate(codes, axis=2).view(np.int8)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True, slots=True)
class Metadata:
    """Everything before the tensors, and the place of each tensor."""

    blob: bytes
    offsets: tuple[int, ...]  # of each tensor in the file
    file_bytes: int


def encode_metadata(
    header: EngineHeader,
    ops: NDArray[Any],
    tensors: Sequence[TensorEntry],
    buffers: Sequence[int],
    *,
    experts_per_token: int = 0,
) -> Metadata:
    """`ops`: records of dtype OP. `buffers`: bytes per row of each activation buffer."""
    known = {name: value for name, value in asdict(header).items() if name not in LATER_FIELDS or value}
    text = json.dumps({**known, "tensors": [tensor.name for tensor in tensors]}, sort_keys=True).encode()
    ops_offset = HEADER.itemsize
    tensors_offset = ops_offset + ops.nbytes
    buffers_offset = tensors_offset + len(tensors) * TENSOR.itemsize
    json_offset = buffers_offset + len(buffers) * BUFFER.itemsize
    metadata_bytes = json_offset + len(text)
    offsets, file_bytes = _place(tensors, metadata_bytes)

    fixed = np.zeros((), HEADER)
    fixed["magic"], fixed["version"] = MAGIC, FORMAT_VERSION
    fixed["file_bytes"], fixed["metadata_bytes"] = file_bytes, metadata_bytes
    fixed["ops_offset"], fixed["tensors_offset"], fixed["buffers_offset"] = ops_offset, tensors_offset, buffers_offset
    fixed["json_offset"], fixed["json_bytes"] = json_offset, len(text)
    fixed["num_ops"], fixed["num_tensors"], fixed["num_buffers"] = len(ops), len(tensors), len(buffers)
    fixed["packing"], fixed["experts_per_token"] = PACKING_CODE, experts_per_token
    fixed["cache_dtype"] = DType[header.cache_dtype.upper()]
    fixed["mixes_heads"] = CACHES[header.cache_dtype].is_rounded
    for name in ("vocab_size", "max_num_tokens", "max_batch_size", "max_seq_len", "block_size"):
        fixed[name] = getattr(header, name)
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        fixed[name] = getattr(header, name)

    records = np.zeros(len(tensors), TENSOR)
    for record, tensor, offset in zip(records, tensors, offsets, strict=True):
        record["dtype"], record["layout"], record["offset"] = tensor.dtype, tensor.layout, offset
        record["rows"], record["cols"] = tensor.rows, tensor.cols
    tail = ops.tobytes() + records.tobytes() + np.array(buffers, BUFFER).tobytes() + text
    fixed["metadata_crc"] = zlib.crc32(fixed.tobytes()[CRC_BEGIN:] + tail)
    return Metadata(fixed.tobytes() + tail, offsets, file_bytes)


def _place(tensors: Sequence[TensorEntry], begin: int) -> tuple[tuple[int, ...], int]:
    offsets = []
    end = begin
    for tensor in tensors:
        offset = _round_up(end, PAGE_BYTES)
        offsets.append(offset)
        end = offset + tensor.num_bytes
    return tuple(offsets), end


def read_header(path: Path) -> EngineHeader:
    """The header of an engine file. `EngineFileError` if it is damaged, foreign or for another machine."""
    try:
        with path.open("rb") as file:
            fixed = _read_fixed(path, file.read(HEADER.itemsize), path.stat().st_size)
            file.seek(0)
            blob = file.read(int(fixed["metadata_bytes"]))
    except FileNotFoundError as error:
        raise NotFound(f"engine file {path} does not exist") from error
    except OSError as error:
        raise EngineFileError(f"{path} cannot be read: {error}") from error
    if zlib.crc32(blob[CRC_BEGIN:]) != fixed["metadata_crc"]:
        raise EngineFileError(f"{path} has a damaged header (checksum); rebuild the engine")
    begin = int(fixed["json_offset"])
    return _decode_json(path, blob[begin : begin + int(fixed["json_bytes"])])


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Properties of a linear layer that its speed depends on."""

    weight_type: DType
    depth: int  # inputs
    columns: int  # outputs

    def __str__(self) -> str:
        return f"{self.weight_type.name.lower()}, {self.depth} to {self.columns}"


def read_linear_layers(path: Path) -> tuple[int, dict[int, LinearShape]]:
    """The number of operations in an engine file that `read_header` accepts, and its linear layers."""
    fixed, blob = _metadata(path)
    try:
        return int(fixed["num_ops"]), _linear_layers(blob, fixed)
    except (ValueError, IndexError, OverflowError) as error:
        raise EngineFileError(f"{path} has operations unknown to this llmserve; rebuild the engine: {error}") from error


def read_linear_weights(path: Path) -> list[tuple[int, str, int]]:
    """For each operation that multiplies by a matrix: its number, the tensor and its outputs."""
    fixed, blob = _metadata(path)
    ops = _ops(fixed, blob)
    begin = int(fixed["json_offset"])
    names = json.loads(blob[begin : begin + int(fixed["json_bytes"])])["tensors"]
    linear = ((index, op) for index, op in enumerate(ops) if op["kind"] in LINEAR_CODES)
    return [(index, names[op["tensors"][0]], int(op["output"]["width"])) for index, op in linear]


def read_ops(path: Path) -> NDArray[Any]:
    """The operations of an engine file that `read_header` accepts: records of dtype OP."""
    return _ops(*_metadata(path))


def _metadata(path: Path) -> tuple[NDArray[Any], bytes]:
    """The fixed part of the header, and everything before the tensors."""
    with path.open("rb") as file:
        fixed: NDArray[Any] = np.frombuffer(file.read(HEADER.itemsize), HEADER)[0]
        file.seek(0)
        return fixed, file.read(int(fixed["metadata_bytes"]))


def _ops(fixed: NDArray[Any], blob: bytes) -> NDArray[Any]:
    return np.frombuffer(blob, OP, int(fixed["num_ops"]), int(fixed["ops_offset"]))


def _linear_layers(blob: bytes, fixed: NDArray[Any]) -> dict[int, LinearShape]:
    ops = _ops(fixed, blob)
    tensors = np.frombuffer(blob, TENSOR, int(fixed["num_tensors"]), int(fixed["tensors_offset"]))
    layers = {}
    for index, op in enumerate(ops):
        if op["kind"] in LINEAR_CODES:
            weight_type = DType(tensors[op["tensors"][0]]["dtype"])
            layers[index] = LinearShape(weight_type, int(op["inputs"][0]["width"]), int(op["output"]["width"]))
    return layers


def _read_fixed(path: Path, blob: bytes, file_bytes: int) -> NDArray[Any]:
    if len(blob) < HEADER.itemsize:
        raise EngineFileError(f"{path} is too short for an engine file; rebuild the engine")
    fixed: NDArray[Any] = np.frombuffer(blob, HEADER)[0]
    if not blob.startswith(MAGIC):
        raise EngineFileError(f"{path} is not an engine file")
    if fixed["version"] < FORMAT_VERSION:
        raise EngineFileError(
            f"{path} has format version {fixed['version']}: built by an older llmserve; rebuild with: "
            f"{rebuild_command(path.parent)}"
        )
    if fixed["version"] > FORMAT_VERSION:
        raise EngineFileError(
            f"{path} has format version {fixed['version']}, this build reads {FORMAT_VERSION}; update llmserve, or "
            "rebuild the engine"
        )
    if fixed["file_bytes"] != file_bytes or not HEADER.itemsize <= fixed["metadata_bytes"] <= file_bytes:
        raise EngineFileError(f"{path} has {file_bytes} bytes instead of {fixed['file_bytes']}: truncated or damaged")
    return fixed


def read_step_bytes(path: Path) -> int:
    """Bytes of weights that a step of one token multiplies, including only the chosen experts."""
    fixed, blob = _metadata(path)
    ops = _ops(fixed, blob)
    tensors = np.frombuffer(blob, TENSOR, int(fixed["num_tensors"]), int(fixed["tensors_offset"]))
    total = 0
    for op in ops[np.isin(ops["kind"], [int(code) for code in LINEAR_CODES])]:
        record = tensors[op["tensors"][0]]
        rows, width = int(record["rows"]), int(op["output"]["width"])
        entry = TensorEntry("", DType(int(record["dtype"])), rows, int(record["cols"]), Layout(int(record["layout"])))
        chosen = int(fixed["experts_per_token"]) * width if width < rows else rows
        total += entry.num_bytes * min(chosen, rows) // rows
    return total


def _decode_json(path: Path, text: bytes) -> EngineHeader:
    try:
        values: Mapping[str, Any] = json.loads(text)
        header = EngineHeader(**{name: value for name, value in values.items() if name != "tensors"})
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise EngineFileError(f"{path} has a header that cannot be read; rebuild the engine: {error}") from error
    if header.packing != PACKING:
        raise EngineFileError(
            f"{path} was built for {header.packing}, but this machine has {PACKING}; run: llmserve build ..."
        )
    return header
