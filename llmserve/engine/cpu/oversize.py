"""Engines larger than memory: weights stay in their file, and the system rereads what it cannot cache."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from llmserve.engine.cpu.layout import read_step_bytes

CACHE_PART = 4  # one such part of memory is for the KV cache and activations; weights use the rest
PROBES, PROBE_BYTES = 16, 4 * 2**20  # bytes read from the disk to measure its speed


def left_beside_weights(available: int, file_bytes: int, least: int) -> int:
    """Memory for everything except weights. If less than `least` remains, some weights are not cached."""
    left, part = available - file_bytes, available // CACHE_PART
    return part if left < least and left < part else left


def oversize_warning(path: Path, available: int, used: int) -> str:
    """The expected speed of the engine file `path` if `used` bytes of memory are not available for its weights."""
    file_bytes, of_step, speed = path.stat().st_size, read_step_bytes(path), _disk_bytes_per_s(path)
    missing = 1 - max(0, available - used) / file_bytes
    rate = speed / (missing * of_step)
    return (
        f"the weights ({_size(file_bytes)}) do not fit in the memory ({_size(available)} are available, of which "
        f"{_size(used)} are for the KV cache and activations): {missing:.0%} of them must be read from the disk, again "
        f"and again. It reads {speed / 1e9:.1f} GB/s, and a token needs {_size(of_step)} of weights: expect about "
        f"{rate:.2g} tokens/s, or more where tokens choose the same experts. Fewer bits (--quantization) or a smaller "
        "KV cache (--max-kv-tokens) leave more in memory"
    )


def _disk_bytes_per_s(path: Path) -> float:
    """Bypasses the file cache if the file system supports that."""
    try:
        return _read_speed(path, getattr(os, "O_DIRECT", 0))
    except OSError:
        return _read_speed(path, 0)


def _read_speed(path: Path, flags: int) -> float:
    size, found = path.stat().st_size, 0
    with mmap.mmap(-1, PROBE_BYTES) as room, open(os.open(path, os.O_RDONLY | flags), "rb", buffering=0) as file:
        begun = time.monotonic()
        for probe in range(PROBES):
            file.seek(size * probe // PROBES // mmap.PAGESIZE * mmap.PAGESIZE)
            found += file.readinto(room) or 0
        return found / max(time.monotonic() - begun, 1e-9)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
