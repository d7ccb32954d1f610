"""The NVIDIA GPUs of this machine, from the driver's own tool: this does not start CUDA and needs no package."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from llmserve.errors import Unsupported

QUERY = ("index", "uuid", "name", "compute_cap", "driver_version", "memory.total", "memory.free")
TIMEOUT_S = 30
NO_GPU = "an NVIDIA GPU is required, but {}; use a machine with one, or build with --target cpu"


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    uuid: str
    name: str
    compute_capability: str  # "9.0"
    driver: str
    total_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.compute_capability}, {self.total_bytes / 2**30:.0f} GiB)"


def visible_gpus() -> Sequence[Gpu]:
    """In CUDA's order for this process. `Unsupported` says why there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except FileNotFoundError:
        raise Unsupported(NO_GPU.format("nvidia-smi was not found, so no driver is installed")) from None
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", "") or getattr(error, "stdout", "") or str(error)
        raise Unsupported(NO_GPU.format(f"nvidia-smi failed: {str(reason).strip()}")) from error
    gpus = _chosen([_parsed(line) for line in done.stdout.splitlines() if line.strip()])
    if not gpus:
        raise Unsupported(NO_GPU.format("none is visible to this process (see CUDA_VISIBLE_DEVICES)"))
    return gpus


def _parsed(line: str) -> Gpu:
    index, uuid, name, capability, driver, total, free = (field.strip() for field in line.split(","))
    return Gpu(int(index), uuid, name, capability, driver, _mebibytes(total), _mebibytes(free))


def _mebibytes(text: str) -> int:
    return int(text) * 2**20 if text.isdigit() else 0  # "[N/A]" on devices that share the host's memory


def _chosen(gpus: list[Gpu]) -> list[Gpu]:
    """The GPUs in CUDA_VISIBLE_DEVICES, by index or prefix of a UUID; as in CUDA, the first unknown ends it."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return gpus
    chosen = []
    for name in filter(None, (part.strip() for part in wanted.split(","))):
        found = [gpu for gpu in gpus if name == str(gpu.index) or (not name.isdigit() and gpu.uuid.startswith(name))]
        if not found:
            break
        chosen += found[:1]
    return chosen
