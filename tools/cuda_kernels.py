"""What the CUDA target's kernels take of a GPU, for networks of real shapes: `make cuda-kernels` (no GPU is needed).

Writes docs/benchmarks/cuda-kernels.md. Exit code 1: a kernel spills registers, or fewer of its warps fit on a
multiprocessor than LEAST_WARPS says.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from llmserve.builder.targets.cuda.compiler import Compiled, TritonCompiler
from llmserve.builder.targets.cuda.lowering import lower
from llmserve.builder.targets.cuda.tiles import tiles_for
from llmserve.engine.cores import num_threads
from llmserve.engine.cuda.layout import Kernel
from llmserve.models.graph import CacheShape, Graph, OpKind, Program
from llmserve.models.spec import Param

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
LEAST_WARPS = {"linear": 4, "gated_linear": 4, "linear_segments": 4, "attention": 4, "attention_segments": 4}
LEAST_WARPS_OF_ROWS = 24


class Shape(NamedTuple):
    """Of one layer."""

    name: str
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner: int
    vocab_size: int


SHAPES = (
    Shape("Baichuan2-7B", 4096, 32, 32, 128, 11008, 125696),
    Shape("Llama-3.1-8B", 4096, 32, 8, 128, 14336, 128256),
    Shape("Qwen3-0.6B", 1024, 16, 8, 128, 3072, 151936),
)


class Row(NamedTuple):
    shape: str
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
        where = f"{self.name} of {self.shape} for {self.architecture}"
        least = LEAST_WARPS.get(self.name, LEAST_WARPS_OF_ROWS)
        found = [f"{where} spills {self.compiled.spilled_bytes} bytes"] if self.compiled.spilled_bytes else []
        return [*found, *([f"{where} leaves room for {self.warps} warps, not {least}"] if self.warps < least else [])]


def network(shape: Shape) -> tuple[Program, list[Param]]:
    """One layer with embedding and head."""
    g = Graph(CacheShape(1, shape.num_kv_heads, shape.head_dim), shape.vocab_size)
    params: list[Param] = []

    def param(name: str, *sizes: int) -> str:
        params.append(Param(name, sizes, (name,), (sizes,), quantizable=len(sizes) == 2))
        return name

    x = g.embed(param("embed", shape.vocab_size, shape.hidden), shape.hidden)
    h = g.rms_norm(x, param("norm", shape.hidden), eps=1e-6)
    q_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    qkv = g.linear(h, param("qkv", q_width + 2 * kv_width, shape.hidden), q_width + 2 * kv_width)
    q, k, v = g.slice(qkv, 0, q_width), g.slice(qkv, q_width, kv_width), g.slice(qkv, q_width + kv_width, kv_width)
    frequencies = tuple(float(10000.0 ** (-i / shape.head_dim)) for i in range(0, shape.head_dim, 2))
    q, k = (g.rope(each, head_dim=shape.head_dim, inv_freq=frequencies) for each in (q, k))
    a = g.attention(
        q, k, v, layer=0, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
    )  # fmt: skip
    x = g.add(x, g.linear(a, param("out", shape.hidden, q_width), shape.hidden))
    h = g.rms_norm(x, param("mlp_norm", shape.hidden), eps=1e-6)
    y = g.gated_activation(g.linear(h, param("gate_up", 2 * shape.inner, shape.hidden), 2 * shape.inner))
    x = g.add(x, g.linear(y, param("down", shape.hidden, shape.inner), shape.hidden))
    h = g.rms_norm(g.select_rows(x), param("last_norm", shape.hidden), eps=1e-6)
    g.logits(h, param("head", shape.vocab_size, shape.hidden))
    program = g.program()
    assert program.ops[-1].kind is OpKind.LOGITS
    return program, params


def kernels_of(shape: Shape, dtype: str = "float16") -> Sequence[Kernel]:
    program, params = network(shape)
    lowered = lower(program, params, dtype=dtype, max_seq_len=8192, block_size=64, tiles=tiles_for(dtype))
    return lowered.record.kernels


def rows(shapes: Sequence[Shape], architectures: Sequence[str], dtype: str = "float16") -> Iterator[Row]:
    """Equal kernels of several shapes come once."""
    first = {kernel: shape.name for shape in reversed(shapes) for kernel in kernels_of(shape, dtype)}
    for architecture in architectures:
        found = TritonCompiler().compile(list(first), architecture, num_threads(0))
        for (kernel, name), compiled in zip(first.items(), found, strict=True):
            yield Row(name, kernel, architecture, compiled)


def table(found: Sequence[Row]) -> str:
    lines = ["| kernel | network | architecture | threads | registers | shared KiB | spilled | programs | warps |"]
    lines.append("|" + "---|" * 9)
    for row in sorted(found, key=lambda row: (row.kernel.function, row.shape, ARCHITECTURES.index(row.architecture))):
        c = row.compiled
        lines.append(
            f"| {row.name} | {row.shape} | {row.architecture} | {c.threads} | {c.registers} | "
            f"{c.shared_bytes / 1024:.1f} | {c.spilled_bytes} | {row.programs} | {row.warps} |"
        )
    return "\n".join(lines)


def report(found: Sequence[Row], dtype: str) -> str:
    names = ", ".join(shape.name for shape in SHAPES)
    return f"""# Kernels of the cuda target

Made by `make cuda-kernels` on a machine without a GPU: {TritonCompiler().version}, {dtype}, kernels of {names} (equal
ones once). Registers are a thread's, shared memory is a program's; *programs* and *warps* are how many of them a
multiprocessor has room for, derived from these and from what the architecture has. Of a product there are two kernels:
one for few rows, with 128 threads, and one for many. Nothing here has been timed.

{table(found)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default=",".join(ARCHITECTURES))
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--output", type=Path, default=REPORT)
    options = parser.parse_args()
    found = list(rows(SHAPES, options.gpu.split(","), options.dtype))
    options.output.write_text(report(found, options.dtype))
    problems = [problem for row in found for problem in row.problems]
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
