"""The `cpu` target: writes the engine file of the embedded engine.

All shapes are known before a weight is read, so the header and the place of every tensor are fixed first; then each
parameter is loaded once, converted, and written where it belongs, pieces of rows on several cores at a time.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmserve.builder.options import DTYPES, QUANTIZATIONS, BuildOptions
from llmserve.builder.pieces import Weight, row_pieces
from llmserve.builder.quantization import WeightPart, quantize_rows, quantized_params
from llmserve.builder.targets.base import CompileJob, Network, Target, no_kernels, unknown_ops
from llmserve.builder.targets.cpu.large_pages import LargePages
from llmserve.builder.targets.cpu.lowering import ACTIVATIONS, Lowered, Lowering, Rows, lower
from llmserve.engine.artifact import CACHE_FILE, ENGINE_FILE
from llmserve.engine.cpu.layout import (
    FORMAT_VERSION,
    PACKING,
    PANEL_COLUMNS,
    DType,
    EngineHeader,
    Layout,
    Metadata,
    cache_bytes_per_head,
    encode_metadata,
    pack_groups,
    pack_panels,
)
from llmserve.engine.cpu.limits import Limit, measure_limit
from llmserve.engine.cpu.tactics import num_timed_bytes, this_machine, time_tactics
from llmserve.engine.memory import available_memory_bytes
from llmserve.engine.tactics import TacticCache
from llmserve.models.graph import OpKind, Program
from llmserve.models.spec import DecoderSpec, HfConfig, Param
from llmserve.progress import Progress

MAX_WIDTH = 1 << 24
MAX_BLOCK = 1 << 16

NUMPY_TYPES: Mapping[DType, Any] = {
    DType.FLOAT32: np.float32,
    DType.FLOAT16: np.float16,
    DType.BFLOAT16: ml_dtypes.bfloat16,
    DType.INT8: np.int8,
    DType.INT4: np.uint8,
}


class CpuTarget:
    """Engines for `llmserve.engine.cpu`; one file serves every instruction set."""

    name = "cpu"
    has_selftest = True
    rounds_activations = True

    def problems(self, program: Program, params: Sequence[Param], options: BuildOptions) -> list[str]:
        return [*_option_problems(options), *_program_problems(program)]

    def notes(self, options: BuildOptions) -> list[str]:
        """A weight-only flag of an old script promises activations that stay as they are."""
        if not options.given.get("use_weight_only"):
            return []
        return [f"use_weight_only: the cpu target's {options.quantization} rounds activations to int8 too"]

    def machine_problems(self, options: BuildOptions) -> list[str]:
        return []

    def engine_bytes(self, program: Program, params: Sequence[Param], options: BuildOptions) -> int:
        return _plan(program, params, options, quantized_params(program, params, options))[1].file_bytes

    def cache_dtype(self, options: BuildOptions) -> str:
        return _cache_dtype(options)

    def kv_bytes_per_token(self, program: Program, options: BuildOptions) -> int:
        cache, block_size = program.cache, options.tokens_per_block
        block_bytes = cache_bytes_per_head(cache.head_dim, block_size, DType[_cache_dtype(options).upper()])
        return -(-2 * cache.num_layers * cache.num_kv_heads * block_bytes // block_size)

    def available_bytes(self) -> int:
        return available_memory_bytes()

    def read_bytes_per_s(self) -> float:
        return measure_limit(Limit.READ)

    def compile(self, job: CompileJob, directory: Path) -> Mapping[str, Any]:
        lowered, metadata = _plan(job.program, job.params, job.options, job.quantized)
        with (directory / ENGINE_FILE).open("wb+", buffering=0) as file:
            file.truncate(metadata.file_bytes)
            with closing(LargePages(file)) as pages:
                TensorWriter(PlacedFile(file.fileno(), pages), lowered, metadata, job).write_all()
        return {
            "packing": PACKING,
            "isa": "any",
            "format_version": FORMAT_VERSION,
            "operations": dict(Counter(op.code.name.lower() for op in lowered.ops)),
            "quantized_params": lowered.num_quantized,
        }

    def compile_kernels(self, network: Network, output: Path, progress: Progress, threads: int) -> str:
        raise no_kernels(self.name)

    def tune(self, directory: Path, earlier: Path, progress: Progress) -> None:
        engine_file = directory / ENGINE_FILE
        known = TacticCache.load(earlier / CACHE_FILE, this_machine())
        progress.phase("time tactics", num_timed_bytes(engine_file))
        timed = time_tactics(engine_file, known, partial(progress.advance, "tactics"))
        timed.save(directory / CACHE_FILE)


def make_target(spec: DecoderSpec, config: HfConfig) -> Target:
    """The Program says everything that the engine needs."""
    return CpuTarget()


class PlacedFile:
    """A file whose parts are written in any order, by several threads."""

    def __init__(self, descriptor: int, pages: LargePages) -> None:
        self._descriptor = descriptor
        self._pages = pages

    def write(self, offset: int, content: NDArray[Any]) -> None:
        left = np.ascontiguousarray(content).reshape(-1).view(np.uint8).data
        self._pages.prepare(offset, len(left))
        while left:
            written = os.pwrite(self._descriptor, left, offset)
            left, offset = left[written:], offset + written


class Piece(NamedTuple):
    """Some rows of a tensor, and where they come from."""

    param: str
    weight: Weight
    rows: Rows
    begin: int  # within the tensor
    end: int


class TensorWriter:
    """Puts numbers where the plan says."""

    def __init__(self, file: PlacedFile, lowered: Lowered, metadata: Metadata, job: CompileJob) -> None:
        self._file = file
        self._lowered = lowered
        self._metadata = metadata
        self._job = job
        self._places = {
            tensor.name: (tensor, offset) for tensor, offset in zip(lowered.tensors, metadata.offsets, strict=True)
        }

    def write_all(self) -> None:
        self._file.write(0, np.frombuffer(self._metadata.blob, np.uint8))
        for name, values in self._lowered.constants.items():
            self._job.advance(name, self._write(name, 0, np.array(values, np.float32)))
        for name, num_bytes in self._job.each(self._write_piece, self._pieces()):
            self._job.advance(name, num_bytes)

    def _pieces(self) -> Iterator[Piece]:
        for param in self._job.params:
            weight = self._job.weight(param.name)
            for rows in self._lowered.stored.get(param.name, ()):  # none where it is stored under another name
                pieces = rows.scheme.pieces if rows.scheme else 1
                for piece in row_pieces((rows.end - rows.begin, *weight.shape[1:]), pieces):
                    yield Piece(param.name, weight, rows, piece.start, piece.stop)

    def _write_piece(self, piece: Piece) -> tuple[str, int]:
        """Name of the tensor, and bytes."""
        name, scheme, begin = piece.rows.tensor, piece.rows.scheme, piece.begin
        rows = slice(piece.rows.begin + begin, piece.rows.begin + piece.end)
        if scheme is None:
            return name, self._write_rows(name, begin, self._with_offset(piece.param, piece.weight[rows]))
        found = quantize_rows(scheme, piece.weight, rows)
        num_bytes = self._write_rows(name, begin, found.values)
        num_bytes += self._write(f"{name}.groups", begin // PANEL_COLUMNS, pack_groups(found.scales, found.zeros))
        num_bytes += self._write(f"{name}.row_scale", begin, found.row_scale)
        return name, num_bytes

    def _with_offset(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        offset = self._lowered.offsets.get(name, 0.0)
        return array.astype(np.float32) + np.float32(offset) if offset else array

    def _write_rows(self, name: str, begin: int, rows: NDArray[Any]) -> int:
        """Rows of a tensor, or elements of a vector, from `begin` on, in its own dtype and layout."""
        tensor, _ = self._places[name]
        values = np.ascontiguousarray(rows, NUMPY_TYPES[tensor.dtype])
        if tensor.layout is Layout.ROWS:
            return self._write(name, begin, values)
        return self._write(name, begin // PANEL_COLUMNS, pack_panels(values, tensor.dtype))

    def _write(self, name: str, begin: int, content: NDArray[Any]) -> int:
        """Rows or panels as they are in the file, from number `begin` on. How many bytes they are."""
        tensor, offset = self._places[name]
        place = offset + begin * content[0].nbytes
        assert place + content.nbytes <= offset + tensor.num_bytes, f"{name} is larger than its place"
        self._file.write(place, content)
        return content.nbytes


def _plan(
    program: Program, params: Sequence[Param], options: BuildOptions, quantized: Mapping[str, Sequence[WeightPart]]
) -> tuple[Lowered, Metadata]:
    lowered = lower(program, params, dtype=DType[options.dtype.upper()], quantized=quantized)
    header = EngineHeader(
        dtype=options.dtype,
        quantization=options.quantization,
        cache_dtype=_cache_dtype(options),
        packing=PACKING,
        vocab_size=program.vocab_size,
        max_num_tokens=options.max_num_tokens,
        max_batch_size=options.max_batch_size,
        max_seq_len=options.max_seq_len,
        block_size=options.tokens_per_block,
        num_layers=program.cache.num_layers,
        num_kv_heads=program.cache.num_kv_heads,
        head_dim=program.cache.head_dim,
        activation_bytes=_activation_bytes(lowered, program, options),
        program=str(program),
    )
    return lowered, encode_metadata(header, lowered.op_records(), lowered.tensors, lowered.buffers)


def _cache_dtype(options: BuildOptions) -> str:
    """An engine that rounds activations multiplies them with keys and values of eight bits too."""
    return "int8" if options.quantization else options.cache_dtype


def _activation_bytes(lowered: Lowered, program: Program, options: BuildOptions) -> int:
    return sum(lowered.buffers) * options.max_num_tokens + 4 * options.max_batch_size * program.vocab_size


def _option_problems(options: BuildOptions) -> list[str]:
    rules = [
        (options.dtype in DTYPES, f"dtype {options.dtype} is not one of {', '.join(DTYPES)}"),
        (options.quantization in QUANTIZATIONS, f"quantization {options.quantization} is not known; use int8 or int4"),
        (1 <= options.tokens_per_block <= MAX_BLOCK, f"tokens_per_block must be 1 to {MAX_BLOCK}"),
        *(
            (1 <= getattr(options, name) <= MAX_WIDTH, f"{name} must be 1 to {MAX_WIDTH}, got {getattr(options, name)}")
            for name in ("max_batch_size", "max_num_tokens", "max_seq_len")
        ),
    ]
    return [text for holds, text in rules if not holds]


def _program_problems(program: Program) -> list[str]:
    found = [f"the cpu target has no {text}" for text in unknown_ops(program, Lowering.known_ops())]
    turned = {op.output for op in program.ops if op.kind is OpKind.ROPE}
    for op in program.ops:
        if op.kind is OpKind.GATED_ACTIVATION and op.attrs["activation"] not in ACTIVATIONS:
            known = ", ".join(map(repr, ACTIVATIONS))
            found.append(f"the cpu target has no activation {op.attrs['activation']!r}, only {known}")
        if op.kind is OpKind.ATTENTION and int(_int(op.attrs["num_heads"])) % program.cache.num_kv_heads:
            found.append(f"layer {op.attrs['layer']}: the number of heads is no multiple of the number of KV heads")
        if op.kind is OpKind.ROPE and op.attrs["head_dim"] != program.cache.head_dim:
            found.append(f"the cpu target turns whole heads of {program.cache.head_dim}, not {op.attrs['head_dim']}")
        if turned & set(op.inputs[2:] if op.kind is OpKind.ATTENTION else op.inputs):
            found.append("the cpu target turns only queries and keys by their position")
    return list(dict.fromkeys(found))


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
