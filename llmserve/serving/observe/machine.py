"""Utilization and memory of this machine's CPUs and GPUs, as samples for `/metrics`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import psutil

from llmserve.serving.backend import GaugeSample
from llmserve.serving.observe.gpu import open_gpus


def cpu_samples() -> Sequence[GaugeSample]:
    memory = psutil.virtual_memory()
    return [
        ("nv_cpu_utilization", {}, psutil.cpu_percent(interval=None) / 100),
        ("nv_cpu_memory_total_bytes", {}, memory.total),
        ("nv_cpu_memory_used_bytes", {}, memory.used),
        ("nv_pinned_memory_pool_total_bytes", {}, 0),  # tensors are in ordinary memory
        ("nv_pinned_memory_pool_used_bytes", {}, 0),
    ]


class MachineSampler:
    """Reads values at a scrape and caches them for `interval_s`. Utilization is that since the previous reading."""

    def __init__(self, interval_s: float, *, cpu: bool = True, gpu: bool = True) -> None:
        self._interval_s = interval_s
        self._sources: list[Callable[[], Sequence[GaugeSample]]] = []
        if cpu:
            psutil.cpu_percent(interval=None)  # starts the interval that the first reading measures
            self._sources.append(cpu_samples)
        if gpu and (gpus := open_gpus()) is not None:
            self._sources.append(gpus.samples)
        self._read_at = -float("inf")
        self._samples: list[GaugeSample] = []

    def samples(self) -> Sequence[GaugeSample]:
        now = time.monotonic()
        if now - self._read_at >= self._interval_s:
            self._read_at = now
            self._samples = [sample for source in self._sources for sample in source()]
        return self._samples
