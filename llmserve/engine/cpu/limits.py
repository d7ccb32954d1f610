"""The maximum speed of this machine at reading memory and adding products, for estimates and `make bench`."""

from __future__ import annotations

from enum import IntEnum

from llmserve.engine.machine.cores import num_threads
from llmserve.engine.machine.memory import available_memory_bytes
from llmserve.engine.native.library import chosen_isa, load_library

READ_BYTES = 2 * 2**30  # several times the size of the largest caches
READ_PASSES = 8
ROUNDS = 2 * 2**20  # a few milliseconds
MULTIPLY_PASSES = 16


class Limit(IntEnum):
    """Per second: bytes read, float products (fused multiply-add), 8-bit integer products."""

    READ = 0
    MULTIPLY = 1
    MULTIPLY_INT8 = 2


def measure_limit(limit: Limit, *, threads: int = 0, isa: str = "") -> float:
    """The best of several passes, on `threads` threads (0: every core that this process may use).

    READ reads a buffer of 2 GiB, or of a quarter of the memory that is available, in each pass, and takes one to two
    seconds; it raises ResourceExhausted if even that is not available. The others run in registers, with the
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
