"""Small CUDA engines over the interpreter, from the networks of the CPU's tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from llmserve.builder.options import BuildOptions
from llmserve.builder.targets.base import CompileJob
from llmserve.builder.targets.cuda.compiler import Compiler
from llmserve.builder.targets.cuda.lowering import lower
from llmserve.builder.targets.cuda.target import CudaTarget
from llmserve.builder.targets.cuda.tiles import MANY, ProductTile, RowRange, Tiles, by_rows, tiles_for
from llmserve.engine.cuda.layout import Kernel
from llmserve.engine.cuda.runner import CudaRunner
from llmserve.engine.directory.artifact import ENGINE_FILE
from tests.engine.cpu.networks import Network, odd_network
from tests.engine.cuda.fake_device import FakeCompiler, FakeDevice
from tests.engine.cuda.hybrids import CONFIGS, UNUSUAL, hybrid

SMALL_TILES = Tiles(
    tuple(by_rows((64, (ProductTile(16, 32, 4, 3),)), (MANY, (ProductTile(32, 64, 4, 3),)))),
    (
        RowRange((1, 8), ProductTile(4, 64, 2, 1), in_words=True),
        RowRange((9, 64), ProductTile(16, 64, 4, 3)),
        RowRange((65, MANY), ProductTile(32, 32, 4, 3)),
    ),
    inputs=16, queries=16, keys=16, segment=16, columns=64, programs=4, warps=8, least_inputs=16,
)  # fmt: skip

WIDE_TILES = Tiles(  # few programs, for the interpreter takes its time for each
    tuple(by_rows((64, (ProductTile(16, 128, 4, 3),)), (MANY, (ProductTile(64, 128, 4, 3),)))),
    tuple(by_rows((64, (ProductTile(16, 128, 4, 3),)), (MANY, (ProductTile(64, 128, 4, 3),)))),
    inputs=64, queries=16, keys=32, segment=64, columns=512, programs=1, warps=1, least_inputs=64,
)  # fmt: skip


def compile_engine(
    network: Network, path: Path, options: BuildOptions, compiler: Compiler | None = None, tiles: Tiles = SMALL_TILES
) -> Path:
    target = CudaTarget(compiler or FakeCompiler(), tiles)
    assert not target.problems(network.program, network.params, options)
    load = partial(network.load, dtype=options.dtype)
    job = CompileJob(network.program, network.params, options, load, lambda what, num_bytes: None)
    with TemporaryDirectory(dir=path.parent) as folder:
        target.compile(job, Path(folder))
        (Path(folder) / ENGINE_FILE).rename(path)
    return path


def open_runner(path: Path, *, num_blocks: int = 64, keeps_all: bool = True) -> CudaRunner:
    return CudaRunner(path, FakeDevice(), num_blocks=num_blocks, threads=1, keeps_all=keeps_all)


def peculiar_kernels(dtype: str) -> Sequence[Kernel]:
    """Of networks with everything that few have, in tiles as large as any; of some others what only they have."""
    found: dict[Kernel, None] = {}
    for network, cache_dtype in product((odd_network(alibi=True), odd_network(peculiar=True)), (dtype, "int8")):
        found.update(dict.fromkeys(_kernels_of(network, dtype, cache_dtype)))
    usual = {kernel.function for kernel in found}
    for kernel in (kernel for name in (*CONFIGS, *UNUSUAL) for kernel in _kernels_of(hybrid(name), dtype, dtype)):
        if kernel.function not in usual:
            found[kernel] = None
    return list(found)


def _kernels_of(network: Network, dtype: str, cache_dtype: str) -> Sequence[Kernel]:
    return lower(
        network.program, network.params, dtype=dtype, cache_dtype=cache_dtype, max_seq_len=1024, block_size=16,
        tiles=tiles_for(dtype),
    ).record.kernels  # fmt: skip
