"""What the CUDA target's kernels take of a GPU, for networks of real shapes: `make cuda-kernels` (no GPU is needed).

Writes docs/benchmarks/cuda-kernels.csv, and a summary beside it. Exit code 1: a kernel spills registers, or fewer of
its warps fit on a multiprocessor than LEAST_WARPS says.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from llmserve.builder.quantization import quantized_params
from llmserve.builder.targets.cuda.compiler import Compiled, Compiler, TritonCompiler
from llmserve.builder.targets.cuda.lowering import lower
from llmserve.builder.targets.cuda.recorder import Recorder
from llmserve.builder.targets.cuda.tiles import tiles_for, without_choice
from llmserve.engine.cuda.layout import Kernel
from llmserve.engine.machine.cores import num_threads
from llmserve.models.number_formats import ROUNDED
from llmserve.models.registry import architecture_for
from llmserve.models.spec import HfConfig
from tools.benchmark.hybrids import HYBRIDS
from tools.benchmark.ours import INT8_CACHE, build_options

REPORT = Path(__file__).resolve().parents[1] / "docs/benchmarks/cuda-kernels.md"
ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
SHARED_BYTES = {"sm_80": 164, "sm_89": 100, "sm_90": 228, "sm_100": 228, "sm_120": 100}  # KiB of a multiprocessor
MOST_THREADS = {"sm_80": 2048, "sm_89": 1536, "sm_90": 2048, "sm_100": 2048, "sm_120": 1536}
REGISTERS = 65536  # of a multiprocessor, given out to warps by 256
RESERVED_SHARED_BYTES = 1024  # of each program
MOST_PROGRAMS = {"sm_80": 32, "sm_89": 24, "sm_90": 32, "sm_100": 32, "sm_120": 24}
# Warps of a multiprocessor that a kernel has to leave room for, written down before it was compiled. Products and
# attention hide latency by the stages of their loads: eight warps are two per scheduler, and one program of eight, or
# two of four, is what tiles of this size allow. What only moves rows hides latency by warps alone: half of the 48 that
# the smallest multiprocessor has.
# Products in words have the loads of eight groups under way in each thread. What has a matrix of a state in registers
# has as many numbers of it in each thread, and those of the next token under way.
LEAST_WARPS = {
    "words_segments": 8,
    "linear": 4,
    "gated_linear": 4,
    "linear_segments": 4,
    "attention": 4,
    "attention_segments": 4,
    "delta_rule": 8,
    "selective_scan": 8,
}
LEAST_WARPS.update(dict.fromkeys(("choose_best", "list_blocks", "draw_filtered", "draw"), 8))  # a program for each row
LEAST_WARPS_OF_ROWS = 24
MAX_SEQ_LEN = 8192
PRECISIONS = ("float16", *ROUNDED, f"float16+{INT8_CACHE}")


LLAMA3_ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
CONFIGS: Mapping[str, HfConfig] = {  # what kernels depend on, as published; one layer has them all
    "Baichuan2-7B": {
        "architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "hidden_size": 4096,
        "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 125696, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096, "hidden_act": "silu",
    },
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "hidden_act": "silu", "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "hidden_act": "silu", "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


class Row(NamedTuple):
    network: str
    precision: str
    kernel: Kernel
    architecture: str
    compiled: Compiled

    @property
    def name(self) -> str:
        return self.kernel.function.rpartition(".")[2]

    @property
    def programs(self) -> int:
        """That a multiprocessor has room for at the same time."""
        warps = self.compiled.threads // 32
        per_warp = -(-self.compiled.registers * 32 // 256) * 256
        shared = self.compiled.shared_bytes + RESERVED_SHARED_BYTES
        return min(
            REGISTERS // (per_warp * warps),
            SHARED_BYTES[self.architecture] * 1024 // shared,
            MOST_THREADS[self.architecture] // self.compiled.threads,
            MOST_PROGRAMS[self.architecture],
        )

    @property
    def warps(self) -> int:
        return self.programs * self.compiled.threads // 32

    @property
    def problems(self) -> list[str]:
        where = f"{self.name} of {self.network} in {self.precision} for {self.architecture}"
        least = LEAST_WARPS.get(self.name, LEAST_WARPS_OF_ROWS)
        found = [f"{where} spills {self.compiled.spilled_bytes} bytes"] if self.compiled.spilled_bytes else []
        return [*found, *([f"{where} leaves room for {self.warps} warps, not {least}"] if self.warps < least else [])]


def kernels_of(
    name: str, precision: str = "float16", *, with_tactics: bool = False, **changes: int
) -> Sequence[Kernel]:
    return lowered(name, precision, with_tactics=with_tactics, **changes).kernels


def lowered(name: str, precision: str, *, with_tactics: bool = False, **changes: int) -> Recorder:
    """Two layers, with the kernels that run where nothing was tuned, or all; `changes`: of the network's config."""
    config = HYBRIDS[name].config() if name in HYBRIDS else {**CONFIGS[name], "num_hidden_layers": 2, **changes}
    architecture = architecture_for(config)
    spec = architecture.from_hf(config)
    program, params = architecture.program(spec), architecture.params(spec)
    options = build_options(precision)
    tiles = tiles_for(options.dtype) if with_tactics else without_choice(tiles_for(options.dtype))
    return lower(
        program, params, quantized=quantized_params(program, params, options), dtype=options.dtype,
        cache_dtype=options.cache().name, max_seq_len=MAX_SEQ_LEN, block_size=64, tiles=tiles,
    ).record  # fmt: skip


def distinct(networks: Sequence[str], precisions: Sequence[str] = PRECISIONS) -> Mapping[Kernel, tuple[str, str]]:
    """Kernels with a network and a precision. Equal ones of several come once, as the first's; of networks with states
    only those of functions that the others lack."""
    first: dict[Kernel, tuple[str, str]] = {}
    others = [name for name in networks if name not in HYBRIDS]
    usual = {kernel.function for name in others for precision in precisions for kernel in kernels_of(name, precision)}
    for precision in precisions:
        for name in networks:
            for kernel in kernels_of(name, precision):
                if name not in HYBRIDS or kernel.function not in usual:
                    first.setdefault(kernel, (name, precision))
    return first


def rows(kernels: Mapping[Kernel, tuple[str, str]], architectures: Sequence[str], compiler: Compiler) -> Iterator[Row]:
    for architecture in architectures:
        found = compiler.compile(list(kernels), architecture, num_threads(0))
        for (kernel, (name, precision)), compiled in zip(kernels.items(), found, strict=True):
            yield Row(name, precision, kernel, architecture, compiled)


def csv_table(found: Sequence[Row]) -> str:
    lines = ["kernel,network,precision,architecture,threads,registers,shared KiB,spilled,programs,warps"]
    for row in sorted(
        found, key=lambda row: (row.kernel.function, row.network, row.precision, ARCHITECTURES.index(row.architecture))
    ):
        c = row.compiled
        cells = (row.name, row.network, row.precision, row.architecture, c.threads, c.registers)
        lines.append(
            ",".join(map(str, (*cells, f"{c.shared_bytes / 1024:.1f}", c.spilled_bytes, row.programs, row.warps)))
        )
    return "\n".join(lines) + "\n"


def summary(data: str) -> str:
    """Of each kernel: how many variants there are, and the extremes of them."""
    variants: dict[str, list[dict[str, str]]] = {}
    for row in csv.DictReader(data.splitlines()):
        variants.setdefault(row["kernel"], []).append(row)
    lines = ["| kernel | variants | max registers | max shared KiB | max spilled | min warps |", "|" + "---|" * 6]
    for name, rows_of_it in variants.items():
        registers, shared, spilled, warps = (
            sorted((row[column] for row in rows_of_it), key=float)
            for column in ("registers", "shared KiB", "spilled", "warps")
        )
        lines.append(f"| {name} | {len(rows_of_it)} | {registers[-1]} | {shared[-1]} | {spilled[-1]} | {warps[0]} |")
    return "\n".join(lines)


def report(data: str, compiler: str, architectures: Sequence[str]) -> str:
    return f"""# Kernels of the cuda target

`make cuda-kernels` compiles kernels of {", ".join(CONFIGS)} in {", ".join(PRECISIONS)}.
Of {", ".join(HYBRIDS)}, two layers each, it compiles what the others lack.
These are for {", ".join(architectures)}, compiled with {compiler}, without a GPU.
Nothing on this page was timed. Kernels that only `llmserve tune` may choose are left out. [All rows](cuda-kernels.csv)
are in a CSV file. Registers are per thread, shared memory is per program. Programs and warps: how many fit on a
multiprocessor at the same time. A product has a kernel for each of several ranges of rows.
Equal kernels count once.

{summary(data)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default=",".join(ARCHITECTURES))
    parser.add_argument("--precision", default=",".join(PRECISIONS))
    parser.add_argument("--output", type=Path, default=REPORT)
    options = parser.parse_args()
    precisions, architectures = options.precision.split(","), options.gpu.split(",")
    found = list(rows(distinct([*CONFIGS, *HYBRIDS], precisions), architectures, TritonCompiler()))
    data = csv_table(found)
    options.output.with_suffix(".csv").write_text(data)
    options.output.write_text(report(data, TritonCompiler().version, architectures))
    problems = [problem for row in found for problem in row.problems]
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
