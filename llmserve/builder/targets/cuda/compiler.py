"""Kernels to binaries for NVIDIA GPUs, with Triton's compiler: no GPU, driver or toolkit is needed.

That happens in other processes, several at a time: so that what the environment says to Triton, its interpreter above
all, is known, and the kernels are never imported where an engine runs.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Protocol

from llmserve.engine.cuda.layout import Kernel
from llmserve.engine.cuda.layout_checks import MOST_REGISTERS
from llmserve.errors import InternalError, Unsupported

PACKAGE = "llmserve.engine.cuda.kernels"
WARP_THREADS = 32
TENSOR_COLUMNS = 512  # of a multiprocessor's tensor memory; what wants more becomes a trap, without a word
ALIGNED = [["tt.divisibility", 16]]
# No place in a source file goes into a binary, and of what the environment may say to Triton only these settings count.
ENVIRONMENT = {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_INTERPRET": "0"}
KEPT = ("TRITON_CACHE_DIR", "TRITON_HOME")  # where it keeps files
# A product and a sum are never one operation: two kernels that do the same then have the same bits.
OPTIONS = {"enable_fp_fusion": False}
MORE_REGISTERS = (0, 8, 16, 64)  # tried where a kernel spills


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel for one architecture; see `layout.Binary`."""

    binary: bytes
    symbol: str
    threads: int
    shared_bytes: int
    num_arguments: int
    registers: int
    spilled_bytes: int


class Compiler(Protocol):
    @property
    def version(self) -> str:
        """Of whatever decides the bytes."""
        ...

    def compile(self, kernels: Sequence[Kernel], architecture: str, threads: int) -> Iterator[Compiled]:
        """In order."""
        ...


class TritonCompiler:
    @property
    def version(self) -> str:
        try:
            return f"triton {metadata.version('triton')}"
        except metadata.PackageNotFoundError:
            raise Unsupported("--target cuda needs Triton's compiler: pip install 'llmserve[cuda]'") from None

    def compile(self, kernels: Sequence[Kernel], architecture: str, threads: int) -> Iterator[Compiled]:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(threads, mp_context=context, initializer=enter) as pool:
            yield from pool.map(partial(compile_kernel, architecture=architecture), kernels)


def enter() -> None:
    for name in [name for name in os.environ if name.startswith("TRITON_") and name not in KEPT]:
        del os.environ[name]
    os.environ.update(ENVIRONMENT)


def compile_kernel(kernel: Kernel, architecture: str) -> Compiled:
    """In a process whose environment is ENVIRONMENT."""
    usual = _compiled(kernel, architecture)
    if kernel.most_registers or not usual.spilled_bytes:
        return usual
    # ptxas sometimes spills where the same number of registers, or some more, set as a limit, would do
    limits = {min(usual.registers + more, MOST_REGISTERS): None for more in MORE_REGISTERS}
    others = (_compiled(replace(kernel, most_registers=limit), architecture) for limit in limits)
    return next((other for other in others if not other.spilled_bytes), usual)


def _compiled(kernel: Kernel, architecture: str) -> Compiled:
    return _described(compiled_by_triton(kernel, architecture))


def compiled_by_triton(kernel: Kernel, architecture: str) -> Any:
    """What Triton returns, its intermediate languages included."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, name = kernel.function.rpartition(".")
    function = getattr(import_module(f"{PACKAGE}.{module}"), name)
    types, constants = dict(kernel.types), dict(kernel.constants)
    signature = {argument: types.get(argument, "constexpr") for argument in function.arg_names}
    if function.arg_names[: len(types)] != list(types) or set(signature) != {*types, *constants}:
        raise InternalError(f"{kernel.function} has the parameters {sorted(signature)}")
    are_aligned = types.keys() - set(kernel.unaligned)
    aligned = {(place,): ALIGNED for place, argument in enumerate(function.arg_names) if argument in are_aligned}
    num_warps = kernel.num_warps // 2 if architecture in kernel.half_on else kernel.num_warps
    limits = {"maxnreg": kernel.most_registers} if kernel.most_registers else {}
    return triton.compile(
        ASTSource(function, signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", int(architecture.removeprefix("sm_")), WARP_THREADS),
        options={"num_warps": num_warps, "num_stages": kernel.num_stages, **limits, **OPTIONS},
    )


def _described(compiled: Any) -> Compiled:
    binary, facts = compiled.asm["cubin"], compiled.metadata
    scratch = getattr(facts, "global_scratch_size", 0) + getattr(facts, "profile_scratch_size", 0)
    if scratch or facts.num_ctas != 1:
        raise InternalError(f"{facts.name} wants memory or clusters that no launch gives it")
    if getattr(facts, "tmem_size", 0) > TENSOR_COLUMNS:
        raise InternalError(f"{facts.name} wants {facts.tmem_size} columns of tensor memory, of {TENSOR_COLUMNS}")
    registers, spilled = _resources(binary)
    return Compiled(
        binary=binary,
        symbol=facts.name,
        threads=facts.num_warps * WARP_THREADS,
        shared_bytes=facts.shared,
        num_arguments=_num_arguments(compiled.asm["ptx"], facts.name),
        registers=registers,
        spilled_bytes=spilled,
    )


def _num_arguments(ptx: str, symbol: str) -> int:
    """Addresses that the compiler adds for itself included."""
    found = re.search(rf"\.entry {re.escape(symbol)}\(([^)]*)\)", ptx)
    if found is None:
        raise InternalError(f"{symbol} is not in its own assembly")
    return found[1].count(".param")


def _resources(binary: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of memory of its own, where what has no register goes."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        listing = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    registers, stack = re.search(r"REG:(\d+)", listing), re.search(r"STACK:(\d+)", listing)
    if registers is None or stack is None:
        raise InternalError(f"cuobjdump says nothing of registers: {listing}")
    return int(registers[1]), int(stack[1])
