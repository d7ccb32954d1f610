"""What Triton makes of a kernel before machine code."""

from __future__ import annotations

import math
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor

from llmserve.builder.targets.cuda.compiler import compiled_by_triton, enter
from llmserve.engine.cuda.layout import Kernel

REDUCTION = re.compile(r'"tt.reduce".*?\n\s*\}\) : \(tensor<([\dx]+)xf32>\) -> (?:tensor<([\dx]+)xf32>|f32)', re.S)


def reduced_sizes(kernel: Kernel, architecture: str) -> set[int]:
    """How many numbers each sum or maximum of the kernel combines."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=enter) as pool:
        return pool.submit(_reduced_sizes, kernel, architecture).result()


def _reduced_sizes(kernel: Kernel, architecture: str) -> set[int]:
    text = compiled_by_triton(kernel, architecture).asm["ttir"]
    return {_size(before) // _size(after) for before, after in REDUCTION.findall(text)}


def _size(shape: str) -> int:
    return math.prod(int(length) for length in shape.split("x") if length)
