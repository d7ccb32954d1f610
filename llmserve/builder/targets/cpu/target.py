"""The `cpu` target: writes the engine file of the embedded engine.

All shapes are known before a weight is read, so the header and the place of every tensor are determined first. Then
each parameter is loaded once, converted and written to its place, in pieces of rows on several cores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.options import BuildOptions
from llmserve.builder.quantization import MATRICES, Quantized, WeightPart
from llmserve.builder.targets.base import CompileJob, Network, Target, no_kernels, quantization_problems, unknown_ops
from llmserve.builder.targets.cpu.large_pages import LargePages
from llmserve.builder.targets.cpu.lowered import Lowered, activations_of
from llmserve.builder.targets.cpu.lowering import Lowering, lower
from llmserve.builder.targets.op_lowering import sequence_bytes, turned_for_others
from llmserve.builder.targets.tensor_writer import Part, TensorWriter, write_at
from llmserve.checkpoint.blocks import BlockRows
from llmserve.engine.cpu.layout import (
    FORMAT_VERSION,
    PACKING,
    PANEL_COLUMNS,
    DType,
    EngineHeader,
    Layout,
    Metadata,
    TensorEntry,
    cache_bytes_per_head,
    encode_metadata,
    pack_groups,
    pack_items,
    pack_panels,
)
from llmserve.engine.cpu.limits import Limit, measure_limit
from llmserve.engine.cpu.tactics import num_timed_bytes, this_machine, time_tactics
from llmserve.engine.directory.artifact import CACHE_FILE, ENGINE_FILE
from llmserve.engine.machine.memory import available_memory_bytes
from llmserve.engine.tactics import TacticCache
from llmserve.models.graph import OpKind, Program
from llmserve.models.number_formats import FLOATS, INT8_CACHE, QUANTIZED, NumberFormat
from llmserve.models.spec import DecoderSpec, HfConfig, Param
from llmserve.progress import Progress

MAX_WIDTH = 1 << 24
MAX_BLOCK = 1 << 16
MAX_TAPS, MAX_KEY_DIM = 32, 4096  # as in `kernels/format.h`


@cache
def _read_bytes_per_s() -> float:
    """Measured once: it takes two seconds, and the machine stays the same."""
    return measure_limit(Limit.READ)


class CpuTarget:
    """Engines for `llmserve.engine.cpu`; one file works with every instruction set."""

    name = "cpu"
    times_tactics = True
    has_selftest = True
    rounds_activations = True
    rounds_tables = True

    def problems(self, program: Program, params: Sequence[Param], options: BuildOptions) -> list[str]:
        return [*_option_problems(options), *_program_problems(program, params)]

    def notes(self, options: BuildOptions) -> list[str]:
        """A weight-only flag in an old script implies that activations are not rounded."""
        if not options.given.get("use_weight_only"):
            return []
        return [f"use_weight_only: the cpu target's {options.quantization} rounds activations to int8 too"]

    def machine_problems(self, options: BuildOptions) -> list[str]:
        return []

    def engine_bytes(self, network: Network, parts: Mapping[str, Sequence[WeightPart]]) -> int:
        return self._plan(network, parts)[1].file_bytes

    def cache_format(self, options: BuildOptions) -> NumberFormat:
        """By default, an engine that rounds weights and activations also stores keys and values in eight bits."""
        rounds = options.weights.activations.is_rounded and not options.weights.keeps_blocks
        found = options.cache(auto=INT8_CACHE if rounds else None)
        return replace(found, mixes_heads=found.is_rounded)

    def kv_bytes_per_token(self, program: Program, options: BuildOptions) -> int:
        cache, block_size = program.cache, options.tokens_per_block
        block_bytes = cache_bytes_per_head(cache.head_dim, block_size, self.cache_format(options))
        return -(-2 * cache.num_layers * cache.num_kv_heads * block_bytes // block_size)

    def kv_bytes_of(self, program: Program, options: BuildOptions, num_tokens: int) -> int:
        return sequence_bytes(program, options, num_tokens, self.kv_bytes_per_token(program, options))

    def available_bytes(self) -> int:
        return available_memory_bytes()

    def read_bytes_per_s(self) -> float:
        return _read_bytes_per_s()

    def compile(self, job: CompileJob, directory: Path) -> Mapping[str, Any]:
        lowered, metadata = self._plan(Network(job.program, job.params, job.options), job.quantized)
        with (directory / ENGINE_FILE).open("wb+", buffering=0) as file:
            file.truncate(metadata.file_bytes)
            with closing(LargePages(file)) as pages:
                pages.prepare(0, len(metadata.blob))
                write_at(file, 0, metadata.blob)
                places = dict(zip((tensor.name for tensor in lowered.tensors), metadata.offsets, strict=True))
                TensorWriter(
                    file=file, places=places, stored=lowered.stored, offsets=lowered.offsets,
                    packer=Panels(lowered.tensors), prepare=pages.prepare,
                ).write_all(job, lowered.constants)  # fmt: skip
        return {
            "packing": PACKING,
            "isa": "any",
            "format_version": FORMAT_VERSION,
            "operations": dict(Counter(op.code.name.lower() for op in lowered.ops)),
            "quantized_params": lowered.num_quantized,
            **({"state_bytes": state_bytes} if (state_bytes := job.program.state_bytes) else {}),
        }

    def compile_kernels(self, network: Network, output: Path, progress: Progress, threads: int) -> str:
        raise no_kernels(self.name)

    def tune(self, directory: Path, earlier: Path, progress: Progress) -> None:
        engine_file = directory / ENGINE_FILE
        known = TacticCache.load(earlier / CACHE_FILE, this_machine())
        progress.phase("time tactics", num_timed_bytes(engine_file))
        timed = time_tactics(engine_file, known, partial(progress.advance, "tactics"))
        timed.save(directory / CACHE_FILE)

    def _plan(self, network: Network, quantized: Mapping[str, Sequence[WeightPart]]) -> tuple[Lowered, Metadata]:
        program, params, options = network
        logits_bytes = 4 * options.max_batch_size * program.output_width
        lowered = lower(program, params, dtype=DType[options.dtype.upper()], quantized=quantized)
        header = EngineHeader(
            dtype=options.dtype,
            quantization=options.quantization,
            cache_dtype=self.cache_format(options).name,
            packing=PACKING,
            vocab_size=program.vocab_size,
            max_num_tokens=options.max_num_tokens,
            max_batch_size=options.max_batch_size,
            max_seq_len=options.max_seq_len,
            block_size=options.tokens_per_block,
            num_layers=program.cache.num_layers,
            num_kv_heads=program.cache.num_kv_heads,
            head_dim=program.cache.head_dim,
            activation_bytes=sum(lowered.buffers) * options.max_num_tokens + logits_bytes,
            program=str(program),
            state_bytes=program.state_bytes,
            output_width=program.output_width if program.pools else 0,
            needs_whole=program.needs_whole,
            hidden_width=program.hidden_width,
            draft_vocab_size=len(program.draft_vocabulary),
        )
        per_token = next((int(op.number("experts_per_token")) for op in program.ops if op.kind is OpKind.EXPERTS), 0)
        records = lowered.op_records()
        return lowered, encode_metadata(header, records, lowered.tensors, lowered.buffers, experts_per_token=per_token)


def make_target(spec: DecoderSpec, config: HfConfig) -> Target:
    """Make the target; the Program has everything that the engine needs."""
    return CpuTarget()


class Panels:
    """The layout of numbers in the engine file: `engine/cpu/layout.py`."""

    def __init__(self, tensors: Sequence[TensorEntry]) -> None:
        self._tensors = {tensor.name: tensor for tensor in tensors}

    def floats(self, tensor: str, values: NDArray[Any]) -> Part:
        entry = self._tensors[tensor]
        values = np.ascontiguousarray(values, entry.dtype.format.values)
        if entry.layout is Layout.ROWS:
            return Part(tensor, values)
        return Part(tensor, pack_panels(values, entry.dtype), PANEL_COLUMNS)

    def integers(self, tensor: str, found: Quantized | BlockRows) -> Iterator[Part]:
        if isinstance(found, Quantized):
            values, groups = found.values, pack_groups(found.scales, found.zeros)
        else:
            kind, flat, count = found.kind, found.blocks.reshape(-1), len(found.blocks)
            assert kind.codes is not None
            assert kind.items is not None
            values = kind.codes(flat).reshape(count, -1)
            groups = pack_items([item.reshape(count, -1) for item in kind.items(flat)])
        yield self.floats(tensor, values)
        yield Part(f"{tensor}.groups", groups, PANEL_COLUMNS)
        yield Part(f"{tensor}.row_scale", found.row_scale)


def _option_problems(options: BuildOptions) -> list[str]:
    rules = [
        (options.dtype in FLOATS, f"dtype must be one of {', '.join(FLOATS)}, got {options.dtype}"),
        (1 <= options.tokens_per_block <= MAX_BLOCK, f"tokens_per_block must be 1 to {MAX_BLOCK}"),
        *(
            (1 <= getattr(options, name) <= MAX_WIDTH, f"{name} must be 1 to {MAX_WIDTH}, got {getattr(options, name)}")
            for name in ("max_batch_size", "max_num_tokens", "max_seq_len")
        ),
    ]
    return [text for holds, text in rules if not holds] + quantization_problems(options, QUANTIZED.values())


def _expert_problems(program: Program, params: Sequence[Param]) -> list[str]:
    """The matrices of all experts are one tensor, which can only be divided at a panel boundary."""
    shapes, mixtures = {param.name: param.shape for param in params}, set()
    found = []
    for op in program.ops:
        if op.kind is OpKind.EXPERTS:
            num_experts = int(_int(op.attrs["num_experts"]))
            mixtures.add((num_experts, op.attrs["experts_per_token"]))
            found += [
                f"{name}: each expert has {shapes[name][0] // num_experts} outputs, the cpu target needs a multiple of "
                f"{PANEL_COLUMNS}"
                for name in op.weights[: MATRICES[op.kind]]
                if shapes[name][0] // num_experts % PANEL_COLUMNS
            ]
    if len(mixtures) > 1:
        found.append("the cpu target supports only mixtures with equal numbers of experts, in total and per token")
    return found


def _program_problems(program: Program, params: Sequence[Param]) -> list[str]:
    found = [f"the cpu target has no {text}" for text in unknown_ops(program, Lowering.known_ops())]
    found += _expert_problems(program, params)
    turned = turned_for_others(program)
    for op in program.ops:
        activations = activations_of(op)
        if op.attrs.get("activation", "") not in ("", *activations):
            known = ", ".join(map(repr, activations))
            found.append(f"the cpu target does not support activation {op.attrs['activation']!r}, only {known}")
        if op.kind is OpKind.CONVOLUTION and _int(op.attrs["taps"]) > MAX_TAPS:
            found.append(f"the cpu target supports convolutions of at most {MAX_TAPS} tokens, not {op.attrs['taps']}")
        for name in ("key_dim", "state_size"):
            if _int(op.attrs.get(name, 0)) > MAX_KEY_DIM:
                found.append(f"the cpu target supports a {name} of at most {MAX_KEY_DIM}, not {op.attrs[name]}")
        if op.kind is OpKind.ATTENTION and _int(op.attrs["num_heads"]) % _int(op.attrs["num_kv_heads"]):
            found.append(f"layer {op.attrs['layer']}: the number of heads is not a multiple of the number of KV heads")
        if op.output in turned and op.attrs["head_dim"] != program.cache.head_dim:
            found.append(f"the cpu target rotates whole heads of {program.cache.head_dim}, not {op.attrs['head_dim']}")
    return list(dict.fromkeys(found))


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
