"""Facts about this machine for `llmserve doctor`. A fact that cannot be determined is reported so, not raised."""

from __future__ import annotations

import dataclasses
import errno
import os
import platform
import re
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any, TypeAlias

import psutil

from llmserve import __version__
from llmserve.engine.machine.cores import quota_cores, usable_cores
from llmserve.engine.machine.description import processor
from llmserve.engine.machine.memory import available_memory_bytes, memory_limit_bytes
from llmserve.engine.machine.nvidia import Gpu, visible_gpus
from llmserve.engine.native.library import available_isas, chosen_isa
from llmserve.errors import Unsupported

PORTS = (8000, 8001, 8002)  # of `llmserve serve`: HTTP, gRPC, metrics
GPU_PACKAGES = (
    "tensorrt", "tensorrt-cu12", "tensorrt-cu13", "tensorrt-llm", "torch", "transformers", "onnxruntime",
    "onnxruntime-gpu", "nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
CUDA_VERSION = re.compile(r"CUDA Version:\s*(\S+)")
NVIDIA_SMI_TIMEOUT_S = 30
Json: TypeAlias = Any
Answer: TypeAlias = tuple[str, Json]  # for people, for programs


@dataclass(frozen=True, slots=True)
class Fact:
    name: str
    text: str  # for people
    data: Json


def machine_facts() -> list[Fact]:
    return [_fact(name, ask) for name, ask in QUESTIONS.items()]


def _fact(name: str, ask: Callable[[], Answer]) -> Fact:
    try:
        return Fact(name, *ask())
    except Exception as error:  # a report on a broken machine must not fail
        return Fact(name, f"cannot be determined: {error}", {"error": str(error)})


def required_packages() -> dict[str, str]:
    """Required packages -> their versions, or an empty string if a package is not installed."""
    try:
        needed = requires("llmserve") or ()
    except PackageNotFoundError:  # code that was copied, not installed
        return {"llmserve": ""}
    names = [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in needed if "extra ==" not in text]
    return {name: _version(name) for name in names}


def package_versions() -> dict[str, str]:
    """Versions of installed packages: required ones, and those for some targets and models."""
    found = required_packages() | {name: _version(name) for name in GPU_PACKAGES}
    return {name: number for name, number in found.items() if number}


@cache
def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _program() -> Answer:
    python, system = platform.python_version(), platform.platform()
    return f"{__version__}, Python {python}, {system}", {"version": __version__, "python": python, "system": system}


def _processor() -> Answer:
    return processor(), processor()


def _kernels() -> Answer:
    isas, used = available_isas(), chosen_isa()
    return f"{', '.join(isas)}; {used} is used", {"available": isas, "used": used}


def _cores() -> Answer:
    usable, total, quota = usable_cores(), os.cpu_count(), quota_cores()
    allowed = "no quota" if quota is None else f"a control group's quota of {quota}"
    return f"{usable} for this process, of {total}; {allowed}", {"usable": usable, "total": total, "quota": quota}


def _memory() -> Answer:
    available, total, limit = available_memory_bytes(), psutil.virtual_memory().total, memory_limit_bytes()
    group = "no limit by a control group" if limit is None else f"a control group's limit of {_gib(limit)}"
    data = {"available_bytes": available, "total_bytes": total, "limit_bytes": limit}
    return f"{_gib(available)} available, of {_gib(total)}; {group}", data


def _gpus() -> Answer:
    gpus = _visible()
    text = "; ".join(f"{gpu.index}: {gpu}, driver {gpu.driver}" for gpu in gpus)
    return text or "none that this process can use", [dataclasses.asdict(gpu) for gpu in gpus]


def _visible() -> Sequence[Gpu]:
    try:
        return visible_gpus()
    except Unsupported:  # the target's check reports the reason
        return ()


def _cuda() -> Answer:
    """The newest CUDA that the driver supports."""
    if not _visible():
        return "none without a GPU", None
    done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True)
    found = CUDA_VERSION.search(done.stdout)
    return (f"{found[1]}, the newest that the driver runs", found[1]) if found else ("nvidia-smi does not say", None)


def _ports() -> Answer:
    states = {str(port): _port_state(port) for port in PORTS}
    return ", ".join(f"{port} {state}" for port, state in states.items()), states


def _port_state(port: int) -> str:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return "is taken" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
    return "is free"


def _packages() -> Answer:
    found = package_versions()
    return ", ".join(f"{name} {number}" for name, number in found.items()), found


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


QUESTIONS: Mapping[str, Callable[[], Answer]] = {
    "llmserve": _program,
    "processor": _processor,
    "kernels": _kernels,
    "cores": _cores,
    "memory": _memory,
    "GPUs": _gpus,
    "CUDA": _cuda,
    "ports": _ports,
    "packages": _packages,
}
