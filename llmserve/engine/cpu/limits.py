"""What this machine can do at most: how fast it reads memory and adds up products. The yardstick of estimates and of
`make bench`."""

from __future__ import annotations

from enum import IntEnum

from llmserve.engine.machine.cores import num_threads
from llmserve.engine.machine.memory import available_memory_bytes
from llmserve.engine.native.library import chosen_isa, load_library

READ_BYTES = 2 * 2**30  # several times the largest caches
READ_PASSES = 8
ROUNDS = 2 * 2**20  # a few milliseconds
MULTIPLY_PASSES = 16


class Limit(IntEnum):
    """Per second: bytes read, products of floats (fused multiply-add), products of 8-bit integers added up."""

    READ = 0
    MULTIPLY = 1
    MULTIPLY_INT8 = 2


def measure_limit(limit: Limit, *, threads: int = 0, isa: str = "") -> float:
    """The best of several passes, on `threads` threads (0: every core that this process may use).

    READ reads a buffer of 2 GiB, or of a quarter of the memory that is available, in each pass, and takes one to two
    seconds; it raises ResourceExhausted where not even that can be had. The others run in registers, with the
    instructions that the kernels of `isa` use, and take a tenth of a second.
    """
    reads = limit is Limit.READ
    rates = load_library().measure(
        limit,
        chosen_isa(isa),
        threads=num_threads(threads),
        amount=max(1, min(READ_BYTES, available_memory_bytes() // 4)) if reads else ROUNDS,
        num_passes=READ_PASSES if reads else MULTIPLY_PASSES,
    )
    return max(rates)
