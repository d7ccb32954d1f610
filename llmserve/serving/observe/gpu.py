"""NVIDIA GPUs, read through NVML: the package `nvidia-ml-py` (extra `nvidia`) and the driver's library.

Without either of them, or if the driver does not respond, there are no samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from llmserve.serving.backend import GaugeSample

logger = logging.getLogger(__name__)


class Gpus:
    """The GPUs of this machine. `nvml` is the module `pynvml`, initialized."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        self._handles = {_text(nvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
        self._energy_at_start = {uuid: self._energy(handle) for uuid, handle in self._handles.items()}

    def samples(self) -> Sequence[GaugeSample]:
        return [
            (name, {"gpu_uuid": uuid}, value)
            for uuid, handle in self._handles.items()
            for name, value in self._readings(uuid, handle)
        ]

    def _readings(self, uuid: str, handle: Any) -> Iterator[tuple[str, float]]:
        """The values that the device reports; consumer cards and virtual GPUs do not report all."""
        nvml = self._nvml
        readings: tuple[tuple[str, Callable[[], float]], ...] = (
            ("nv_gpu_utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            ("nv_gpu_memory_total_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total),
            ("nv_gpu_memory_used_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            ("nv_gpu_power_usage", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            ("nv_gpu_power_limit", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
            ("nv_energy_consumption", lambda: self._energy(handle) - self._energy_at_start[uuid]),
        )
        for name, read in readings:
            with suppress(nvml.NVMLError):
                yield name, read()

    def _energy(self, handle: Any) -> float:
        """Joules since the driver was loaded; 0 if the device does not count them."""
        try:
            millijoules: int = self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except self._nvml.NVMLError:
            return 0.0
        return millijoules / 1000


def open_gpus() -> Gpus | None:
    """The GPUs of this machine; None if none can be read."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        gpus = Gpus(pynvml)
    except pynvml.NVMLError as error:
        logger.debug("no GPU metrics: %s", error)
        return None
    return gpus


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
