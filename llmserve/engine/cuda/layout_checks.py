"""Checks every number and address in a CUDA engine file's header before a device uses any.

The checksum protects files from damage, so this is for files that another program has written or changed. Binaries are
not checked: engine files contain code, and must come from a trusted source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from llmserve.engine.cuda.choices import choice_offsets
from llmserve.engine.cuda.inputs import Inputs, max_tiles
from llmserve.engine.cuda.layout import (
    ITEM_BYTES,
    MOST_GRID,
    TILE_ROWS,
    TYPES,
    Address,
    Binary,
    EngineHeader,
    Extent,
    Kernel,
    Room,
    StepPart,
)
from llmserve.engine.cuda.tactics import is_product
from llmserve.models.number_formats import CACHES, FLOATS

POINTERS = ("*i32", *TYPES.values())
COUNTS = ("vocab_size", "max_num_tokens", "max_batch_size", "max_seq_len", "block_size", "num_layers", "num_kv_heads",
          "head_dim", "query_tokens", "head_rows")  # fmt: skip
MOST_COUNT = 1 << 24
MOST_LAYERS = 1 << 12
MOST_ROWS = 1 << 30
MOST_BYTES = 1 << 44
WARP_THREADS, MOST_THREADS = 32, 1024  # of a program
MOST_REGISTERS = 255  # of a thread
MOST_SHARED_BYTES = 256 << 10
MOST_HIDDEN_ARGUMENTS = 16  # the compiler's own
ALIGNMENT = 16
ARCHITECTURE = re.compile(r"sm_[1-9][0-9]{1,3}", re.ASCII)
FUNCTION = re.compile(r"[a-z0-9_]{1,100}\.[a-z0-9_]{1,100}", re.ASCII)
SYMBOL = re.compile(r"[A-Za-z_$][\w$]{0,4095}", re.ASCII)


def problems(header: EngineHeader) -> list[str]:
    """All problems; values that later checks use are checked first."""
    for check in (_sizes, _kernels, _data, _launches, _tactics):
        if found := list(check(header)):
            return found
    return []


def _sizes(header: EngineHeader) -> Iterator[str]:
    if header.dtype not in tuple(FLOATS):
        yield f"dtype is {_shown(header.dtype)}"
    if header.cache_dtype not in tuple(CACHES):
        yield f"cache_dtype is {_shown(header.cache_dtype)}"
    counts = {name: getattr(header, name) for name in COUNTS}
    for name, value in counts.items():
        if not _is_whole(value, 1, MOST_LAYERS if name == "num_layers" else MOST_COUNT):
            yield f"{name} is {_shown(value)}"
    if header.layer_heads and len(header.layer_heads) != header.num_layers:
        yield f"layer_heads has {len(header.layer_heads)} layers"
    for layer, heads in enumerate(header.layer_heads):
        if not all(_is_whole(count, 1, MOST_COUNT) for count in heads):
            yield f"the heads of layer {layer} are {_shown(tuple(heads))}"
    sizes = {name: getattr(header, name) for name in ("scratch_bytes", "data_bytes", "tensors_begin", "state_bytes")}
    sizes |= {f"buffer {place}": num_bytes for place, num_bytes in enumerate(header.buffers)}
    for name, value in sizes.items():
        if not _is_whole(value, 0, MOST_BYTES):
            yield f"{name} is {_shown(value)}"
        elif name == "state_bytes" and value % ALIGNMENT:
            yield f"state_bytes is {value}, which is not a multiple of {ALIGNMENT}"
        elif name == "tensors_begin" and _is_whole(header.data_bytes, 0, MOST_BYTES) and value > header.data_bytes:
            yield f"tensors begin at {value}, after the end of the data"


def _kernels(header: EngineHeader) -> Iterator[str]:
    if header.head_rows > header.max_num_tokens:
        yield f"head_rows is {header.head_rows}, more than max_num_tokens"
    for place, kernel in enumerate(header.kernels):
        if not _is_kernel(kernel):
            yield f"kernel {place} is not valid"


def _is_kernel(kernel: Kernel) -> bool:
    return (
        isinstance(kernel.function, str)
        and FUNCTION.fullmatch(kernel.function) is not None
        and all(_is_pair(pair) and isinstance(pair[1], str) and pair[1] in POINTERS for pair in kernel.types)
        and all(isinstance(name, str) for name in kernel.unaligned)
        and all(_is_pair(pair) and isinstance(pair[1], int | float | str) for pair in kernel.constants)
        and _is_whole(dict(kernel.constants).get("WINDOW", 0), 0, MOST_COUNT)
        and _is_whole(kernel.num_warps, 1, MOST_THREADS // WARP_THREADS)
        and _is_whole(kernel.num_stages, 1, MOST_THREADS)
        and _is_whole(kernel.most_registers, 0, MOST_REGISTERS)
    )


def _is_pair(pair: tuple[Any, ...]) -> bool:
    return len(pair) == 2 and isinstance(pair[0], str)


def _data(header: EngineHeader) -> Iterator[str]:
    """Binaries, then consecutive tensors."""
    if not header.binaries:
        yield "there are no binaries"
    for gpu, binaries in header.binaries.items():
        if not ARCHITECTURE.fullmatch(gpu):
            yield f"{_shown(gpu)} is not an architecture"
        if len(binaries) != len(header.kernels):
            yield f"{_shown(gpu)} has {len(binaries)} binaries for {len(header.kernels)} kernels"
            continue
        for place, (kernel, binary) in enumerate(zip(header.kernels, binaries, strict=True)):
            if not _is_binary(binary, kernel, header.tensors_begin):
                yield f"the binary of kernel {place} for {_shown(gpu)} is not valid: {_shown(tuple(binary))}"
    end, names = header.tensors_begin, set()
    for tensor in header.tensors:
        is_sound = (
            isinstance(tensor.name, str)
            and tensor.name not in names
            and isinstance(tensor.dtype, str)
            and tensor.dtype in ITEM_BYTES
            and all(_is_whole(extent, 1, MOST_BYTES) for extent in (tensor.rows, tensor.cols))
            and _is_whole(tensor.offset, end, header.data_bytes)
            and tensor.offset + tensor.num_bytes <= header.data_bytes
        )
        if not is_sound:
            yield f"tensor {_shown(tuple(tensor))} has no valid place of its own in {header.data_bytes} bytes of data"
            continue
        names.add(tensor.name)
        end = tensor.offset + tensor.num_bytes


def _is_binary(binary: Binary, kernel: Kernel, end: int) -> bool:
    num_arguments = len(kernel.types)
    return (
        isinstance(binary.symbol, str)
        and SYMBOL.fullmatch(binary.symbol) is not None
        and _is_whole(binary.threads, WARP_THREADS, MOST_THREADS)
        and binary.threads % WARP_THREADS == 0
        and _is_whole(binary.shared_bytes, 0, MOST_SHARED_BYTES)
        and _is_whole(binary.num_arguments, num_arguments, num_arguments + MOST_HIDDEN_ARGUMENTS)
        and _is_whole(binary.offset, 0, end)
        and _is_whole(binary.num_bytes, 1, end - binary.offset)
    )


def _launches(header: EngineHeader) -> Iterator[str]:
    rooms = _Rooms(header)
    for place, launch in enumerate(header.launches):
        if not _is_whole(launch.kernel, 0, len(header.kernels) - 1):
            yield f"launch {place} is of kernel {_shown(launch.kernel)}"
            continue
        kernel = header.kernels[launch.kernel]
        if not isinstance(launch.part, str) or launch.part not in {part.value for part in StepPart}:
            yield f"launch {place} ({kernel.function}) is of part {_shown(launch.part)}"
            continue
        rows = launch.least_rows, launch.most_rows
        if not all(_is_whole(count, 1, MOST_ROWS) for count in rows) or rows[0] > rows[1]:
            yield f"launch {place} ({kernel.function}) runs for {_shown(rows)} rows"
        if not _is_grid(header, launch.part, launch.grid, kernel):
            yield f"launch {place} ({kernel.function}) has the grid {_shown(launch.grid)}"
        if len(launch.arguments) != len(kernel.types):
            yield f"launch {place} ({kernel.function}) has {len(launch.arguments)} arguments"
            continue
        for (name, _), address in zip(kernel.types, launch.arguments, strict=True):
            at = rooms.place(address)
            if at is None or (name not in kernel.unaligned and at % ALIGNMENT):
                yield f"launch {place} ({kernel.function}) has {name} at {_shown(tuple(address))}"


def _tactics(header: EngineHeader) -> Iterator[str]:
    """The tactics of a kernel must have the same arguments."""
    parts: dict[int, set[str]] = {}
    for launch in header.launches:
        parts.setdefault(launch.kernel, set()).add(launch.part)
    for number, tactics in header.tactics.items():
        if number not in parts:
            yield f"kernel {_shown(number)} has tactics but is never launched"
            continue
        kernel = header.kernels[number]
        if not is_product(kernel):
            yield f"kernel {number} ({kernel.function}) has tactics, but is not a product"
            continue
        for tactic in tactics:
            if not _is_whole(tactic.kernel, 0, len(header.kernels) - 1):
                yield f"a tactic of kernel {number} is kernel {_shown(tactic.kernel)}"
                continue
            other = header.kernels[tactic.kernel]
            if (other.function, other.types, other.unaligned, is_product(other)) != (
                kernel.function, kernel.types, kernel.unaligned, True,
            ):  # fmt: skip
                yield f"kernel {tactic.kernel} takes different arguments from kernel {number}, whose tactic it is"
            if not all(_is_grid(header, part, tactic.grid, other) for part in parts[number]):
                yield f"a tactic of kernel {number} ({kernel.function}) has the grid {_shown(tactic.grid)}"


def _is_grid(header: EngineHeader, part: str, grid: tuple[Extent, Extent, Extent], kernel: Kernel) -> bool:
    """Within the device's limits; and with tiles of rows as large as the kernel's, so that they fit in the buffers."""
    tile = dict(kernel.constants).get("TILE_ROWS", 1)
    most = header.max_num_tokens if part == StepPart.BODY.value else header.head_rows
    return all(
        _is_extent(extent)
        and (not extent.rows or (extent.rows == tile and TILE_ROWS % extent.rows == 0))
        and 1 <= extent.programs(most, max_tiles(header, most)) <= limit
        for extent, limit in zip(grid, MOST_GRID, strict=True)
    )


def _is_extent(extent: Extent) -> bool:
    is_sound = _is_whole(extent.rows, 0, TILE_ROWS) and _is_whole(extent.fixed, 1, MOST_GRID[0])
    return is_sound and isinstance(extent.of_tiles, bool)


class _Rooms:
    """Memory that addresses may refer to."""

    def __init__(self, header: EngineHeader) -> None:
        inputs = Inputs(header)
        choices, choice_bytes = choice_offsets(header)
        keys, values = (_planes(planes) for planes in zip(*header.plane_bytes, strict=True))  # of one block
        self._rooms: dict[Room, dict[str, tuple[int, int]]] = {  # by name: begin in the room, bytes
            Room.TENSOR: {
                tensor.name: (tensor.offset - header.tensors_begin, tensor.num_bytes) for tensor in header.tensors
            },
            Room.BUFFER: {str(place): (0, num_bytes) for place, num_bytes in enumerate(header.buffers)},  # of a row
            Room.INPUT: {name: (begin, inputs.num_bytes - begin) for name, begin in inputs.offsets.items()},
            Room.CHOICE: {name: (begin, choice_bytes - begin) for name, begin in choices.items()},
            Room.KEYS: keys,
            Room.VALUES: values,
            Room.STATES: {"": (0, header.state_bytes)},  # of a slot
            Room.SCRATCH: {"": (0, header.scratch_bytes)},
            Room.LOGITS: {"": (0, 4 * header.vocab_size)},  # of a row
        }

    def place(self, address: Address) -> int | None:
        """The offset in its room, in bytes; None if it is in no room."""
        if not isinstance(address.room, str) or not isinstance(address.name, str):
            return None
        if address.room not in {room.value for room in Room}:
            return None
        begin, num_bytes = self._rooms[Room(address.room)].get(address.name, (0, 0))
        return begin + address.offset if _is_whole(address.offset, 0, num_bytes - 1) else None


def _planes(num_bytes: Sequence[int]) -> dict[str, tuple[int, int]]:
    """The places of each layer's keys, or values, one after another."""
    begins = accumulate(num_bytes, initial=0)
    return {str(layer): place for layer, place in enumerate(zip(begins, num_bytes, strict=False))}


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _shown(value: object) -> str:
    """The beginning of a value from the file, which may be anything."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
