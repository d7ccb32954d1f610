"""How fast this machine reads memory: the limit that decoding one sequence cannot pass."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil

BUFFER_BYTES = 256 * 2**20  # far more than any cache
NUM_PASSES = 4


def measure_read_bandwidth() -> float:
    """Bytes per second: the best of four passes over 256 MiB, one thread per physical core, each summing its own part.

    Takes about a second at most. numpy's reduction runs outside the GIL and reads as fast as one core can.
    """
    num_threads = psutil.cpu_count(logical=False) or 1
    parts = np.array_split(np.ones(BUFFER_BYTES // 8, np.uint64), num_threads)
    with ThreadPoolExecutor(num_threads) as pool:
        return max(_one_pass(pool, parts) for _ in range(NUM_PASSES))


def _one_pass(pool: ThreadPoolExecutor, parts: list[np.typing.NDArray[np.uint64]]) -> float:
    start = time.perf_counter()
    list(pool.map(np.add.reduce, parts))
    return BUFFER_BYTES / (time.perf_counter() - start)
