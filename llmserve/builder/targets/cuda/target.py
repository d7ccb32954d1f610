"""The `cuda` target: compiles an engine for NVIDIA GPUs, on any machine.

The Program becomes launches, their kernels are compiled for every requested architecture, and weights are written in
pieces of rows on several cores.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmserve.builder.options import BuildOptions
from llmserve.builder.quantization import WeightPart, quantized_params
from llmserve.builder.targets.base import COMPUTES, CompileJob, Network, Target, quantization_problems, unknown_ops
from llmserve.builder.targets.cuda.attention import groups, layer_heads, tile_queries
from llmserve.builder.targets.cuda.compiler import Compiled, Compiler, TritonCompiler
from llmserve.builder.targets.cuda.integers import MULTIPLIED, Panels
from llmserve.builder.targets.cuda.kernel_file import StoredKernels, write_kernels
from llmserve.builder.targets.cuda.lowering import Lowered, Lowering, lower
from llmserve.builder.targets.cuda.options import ARCHITECTURES, CudaOptions
from llmserve.builder.targets.cuda.tiles import Tiles, tiles_for
from llmserve.builder.targets.op_lowering import sequence_bytes
from llmserve.builder.targets.tensor_writer import TensorWriter, write_at
from llmserve.engine.cuda.layout import FORMAT_VERSION, Binary, EngineHeader, Kernel, placed_tensors
from llmserve.engine.directory.artifact import ENGINE_FILE
from llmserve.engine.machine.nvidia import visible_gpus
from llmserve.errors import LlmserveError, RecipeError
from llmserve.models.graph import OpKind, Program
from llmserve.models.number_formats import NumberFormat
from llmserve.models.spec import DecoderSpec, HfConfig, Param
from llmserve.progress import Progress

HEADER_BYTES = 1 << 20  # approximate, for a plan: with kernels for one architecture
MOST_HEAD_ROWS = 64
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")  # of kernels/activations.py


class CudaTarget:
    """Engines for `llmserve.engine.cuda`."""

    name = "cuda"
    times_tactics = False
    has_selftest = True
    rounds_activations = True
    rounds_tables = False

    def __init__(self, compiler: Compiler | None = None, tiles: Tiles | None = None) -> None:
        self._compiler = compiler or TritonCompiler()
        self._tiles = tiles

    def problems(self, program: Program, params: Sequence[Param], options: BuildOptions) -> list[str]:
        found = [*_gpu_problems(options), *self._group_problems(program, options)]
        found += quantization_problems(options, MULTIPLIED)
        found += [f"the cuda target does not support {text}" for text in unknown_ops(program, Lowering.known_ops())]
        found += _value_problems(program)
        return found or self._kernel_problems(program, params, options)

    def notes(self, options: BuildOptions) -> list[str]:
        return ["the cuda target is experimental: it has only been tested on an H200"]

    def machine_problems(self, options: BuildOptions) -> list[str]:
        try:
            self._compiler_for(options).version  # noqa: B018 - asks
        except LlmserveError as error:
            return [str(error)]
        return []

    def engine_bytes(self, network: Network, parts: Mapping[str, Sequence[WeightPart]]) -> int:
        """The size of the weights, and an estimate of the rest of the file."""
        lowered = self._lowered(*network, parts)
        return HEADER_BYTES + placed_tensors(lowered.record.tensors.values(), 0)[1]

    def cache_format(self, options: BuildOptions) -> NumberFormat:
        return options.cache()

    def kv_bytes_per_token(self, program: Program, options: BuildOptions) -> int:
        block_size = options.tokens_per_block
        planes = (heads.plane_bytes(options.cache().name, block_size) for heads in layer_heads(program))
        return -(-sum(map(sum, planes)) // block_size)

    def kv_bytes_of(self, program: Program, options: BuildOptions, num_tokens: int) -> int:
        token_bytes = self.kv_bytes_per_token(program, options)
        if len({*layer_heads(program)}) > 1:
            return options.in_whole_blocks(num_tokens) * token_bytes
        return sequence_bytes(program, options, num_tokens, token_bytes)

    def available_bytes(self) -> int:
        return 0  # the GPU may be in another machine

    def read_bytes_per_s(self) -> float:
        return 0.0

    def compile(self, job: CompileJob, directory: Path) -> Mapping[str, Any]:
        architectures = job.options.of(CudaOptions).architectures or architectures_here()
        lowered = self._lowered(job.program, job.params, job.options, job.quantized)
        record, compiler = lowered.record, self._compiler_for(job.options)
        compiled = _compiled(compiler, record.kernels, architectures, job.advance, job.threads)
        binaries, begin = _placed_binaries(compiled)
        tensors, end = placed_tensors(record.tensors.values(), begin)
        header = self._header(job, lowered, binaries)
        header = replace(header, tensors=tensors, tensors_begin=tensors[0].offset, data_bytes=end)
        blob = header.encode()
        with (directory / ENGINE_FILE).open("wb+", buffering=0) as file:
            file.truncate(len(blob) + end)
            file.write(blob)
            for name, found in compiled.items():
                for each, place in zip(found, binaries[name], strict=True):
                    write_at(file, len(blob) + place.offset, each.binary)
            places = {tensor.name: len(blob) + tensor.offset for tensor in tensors}
            TensorWriter(
                file=file, places=places, stored=lowered.stored, offsets=lowered.offsets, packer=Panels(tensors)
            ).write_all(job, record.constants)
        return {
            "format_version": FORMAT_VERSION,
            "architectures": list(architectures),
            "compiler": compiler.version,
            COMPUTES: _kernels_digest(compiled),
            "kernels": dict(sorted(Counter(kernel.function for kernel in record.kernels).items())),
            "launches": len(record.launches),
            "tactics": sum(map(len, record.tactics.values())),
            "quantized_params": len(job.quantized),
        }

    def compile_kernels(self, network: Network, output: Path, progress: Progress, threads: int) -> str:
        """Write everything that `compile` would compile to a file for `--kernels`."""
        program, params, options = network
        architectures = options.of(CudaOptions).architectures or architectures_here()
        kernels = self._lowered(program, params, options, quantized_params(program, params, options)).record.kernels
        compiler = self._compiler_for(options)
        progress.phase("compile", HEADER_BYTES * len(architectures))
        write_kernels(
            output, compiler.version, kernels, _compiled(compiler, kernels, architectures, progress.advance, threads)
        )
        return f"{len(kernels)} kernels for {', '.join(architectures)}, {compiler.version}"

    def _compiler_for(self, options: BuildOptions) -> Compiler:
        given = options.of(CudaOptions).kernels
        return StoredKernels(Path(given)) if given else self._compiler

    def tune(self, directory: Path, earlier: Path, progress: Progress) -> None:
        """Does nothing, because the GPU may be in another machine."""

    def _kernel_problems(self, program: Program, params: Sequence[Param], options: BuildOptions) -> list[str]:
        """Problems with the file of kernels, if one is given; checked before anything is rounded."""
        given = options.of(CudaOptions)
        if not given.kernels:
            return []
        kernels = self._lowered(program, params, options, quantized_params(program, params, options)).record.kernels
        stored, wanted = StoredKernels(Path(given.kernels)), given.architectures or architectures_here()
        try:
            return [problem for name in wanted if (problem := stored.problem(kernels, name))]
        except RecipeError as error:
            return [str(error)]

    def _group_problems(self, program: Program, options: BuildOptions) -> list[str]:
        most = tile_queries(program, self._tiles_for(options), options.cache().name)
        return [
            f"{group} query heads per key and value head; the cuda target supports at most {most}"
            for group in sorted(groups(program))
            if group > most
        ]

    def _lowered(
        self,
        program: Program,
        params: Sequence[Param],
        options: BuildOptions,
        quantized: Mapping[str, Sequence[WeightPart]],
    ) -> Lowered:
        return lower(
            program, params, quantized=quantized, dtype=options.dtype, cache_dtype=options.cache().name,
            max_seq_len=options.max_seq_len, block_size=options.tokens_per_block,
            tiles=self._tiles_for(options).up_to(options.max_num_tokens),
        )  # fmt: skip

    def _tiles_for(self, options: BuildOptions) -> Tiles:
        return self._tiles or tiles_for(options.dtype)

    def _header(self, job: CompileJob, lowered: Lowered, binaries: Mapping[str, tuple[Binary, ...]]) -> EngineHeader:
        options, cache, record = job.options, job.program.cache, lowered.record
        heads = layer_heads(job.program)
        return EngineHeader(
            dtype=options.dtype,
            cache_dtype=options.cache().name,
            vocab_size=job.program.vocab_size,
            max_num_tokens=options.max_num_tokens,
            max_batch_size=options.max_batch_size,
            max_seq_len=options.max_seq_len,
            block_size=options.tokens_per_block,
            num_layers=cache.num_layers,
            num_kv_heads=cache.num_kv_heads,
            head_dim=cache.head_dim,
            query_tokens=lowered.query_tokens,
            head_rows=min(MOST_HEAD_ROWS, options.max_num_tokens),
            scratch_bytes=record.scratch_bytes,
            state_bytes=lowered.state_bytes,
            layer_heads=heads if len({*heads}) > 1 else (),
            buffers=lowered.buffers,
            kernels=record.kernels,
            launches=tuple(record.launches),
            tactics=record.tactics,
            tensors=(),
            binaries=binaries,
            data_bytes=0,
            tensors_begin=0,
        )


def make_target(spec: DecoderSpec, config: HfConfig) -> Target:
    """Make the target; the Program has everything that the engine needs."""
    return CudaTarget()


def architectures_here() -> tuple[str, ...]:
    """Architectures of this machine's GPUs. `Unsupported` if there is none."""
    return tuple(dict.fromkeys(f"sm_{gpu.compute_capability.replace('.', '')}" for gpu in visible_gpus()))


def _value_problems(program: Program) -> list[str]:
    """Problems with ops whose kinds and attributes are supported."""
    found = [
        f"the cuda target lacks activation {op.attrs['activation']!r}; it has {', '.join(map(repr, ACTIVATIONS))}"
        for op in program.ops
        if op.kind is OpKind.GATED_ACTIVATION and op.attrs["activation"] not in ACTIVATIONS
    ]
    return list(dict.fromkeys(found))


def _gpu_problems(options: BuildOptions) -> list[str]:
    if options.of(CudaOptions).architectures:
        return []
    try:
        here = architectures_here()
    except LlmserveError:
        return [f"gpu: this machine has no GPU to build for; name the architectures, from {', '.join(ARCHITECTURES)}"]
    return [
        f"gpu: this machine has {name}, but the cuda target builds for {', '.join(ARCHITECTURES)}"
        for name in here
        if name not in ARCHITECTURES
    ]


def _compiled(
    compiler: Compiler, kernels: Sequence[Kernel], architectures: Sequence[str], advance: Callable[[str, int], None],
    threads: int,
) -> dict[str, list[Compiled]]:  # fmt: skip
    """Binaries by architecture, in the order of `kernels`."""
    found: dict[str, list[Compiled]] = {name: [] for name in architectures}
    for name, compiled in found.items():
        for kernel, each in zip(kernels, compiler.compile(kernels, name, threads), strict=True):
            advance(f"{kernel.function} for {name}", len(each.binary))
            compiled.append(each)
    return found


def _kernels_digest(compiled: Mapping[str, Sequence[Compiled]]) -> str:
    """A digest of kernels, because those from another compiler may compute different bits."""
    digest = hashlib.sha256()
    for name in sorted(compiled):
        for each in compiled[name]:
            digest.update(f"{name} {each.symbol} {len(each.binary)} ".encode() + each.binary)
    return digest.hexdigest()


def _placed_binaries(compiled: Mapping[str, Sequence[Compiled]]) -> tuple[dict[str, tuple[Binary, ...]], int]:
    """Binaries one after the other, and the end of the last one."""
    placed, end = {}, 0
    for name, found in compiled.items():
        binaries = []
        for each in found:
            facts = (each.symbol, each.threads, each.shared_bytes, each.num_arguments)
            binaries.append(Binary(*facts, end, len(each.binary)))
            end += len(each.binary)
        placed[name] = tuple(binaries)
    return placed, end
