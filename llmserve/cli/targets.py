"""What each target needs from a machine, what of it is there, and what to do about the rest, for `llmserve doctor`."""

from __future__ import annotations

import ctypes.util
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmserve.builder.options import BuildOptions
from llmserve.cli.machine import required_packages
from llmserve.engine.cpu.library import available_isas, chosen_isa
from llmserve.engine.memory import available_memory_bytes
from llmserve.engine.nvidia import visible_gpus
from llmserve.engine.tensorrt_llm import library
from llmserve.engine.tensorrt_llm.library import Mode
from llmserve.errors import Unsupported

DEFAULT_TARGET = BuildOptions().target
OLDEST_PYTHON = (3, 11)
LITTLE_MEMORY_BYTES = 2**30
OLDEST_LISTED_CAPABILITY = (8, 0)  # Ampere, the oldest in TensorRT-LLM's published support matrix


@dataclass(frozen=True, slots=True)
class Check:
    """One need of a target. `is_met` false: the target does not work; `advice`: what to do, or what to know."""

    need: str
    is_met: bool
    found: str
    advice: str = ""


def check_targets() -> Mapping[str, Sequence[Check]]:
    return {name: [_checked(need, ask) for need, ask in needs.items()] for name, needs in NEEDS.items()}


def works(checks: Sequence[Check]) -> bool:
    return all(check.is_met for check in checks)


def _checked(need: str, ask: Callable[[str], Check]) -> Check:
    try:
        return ask(need)
    except Unsupported as error:  # our own errors say what to do
        found, _, advice = str(error).partition("; ")
        return Check(need, False, found, advice)
    except Exception as error:  # border: a report on a broken machine must not break
        return Check(need, False, f"cannot be found out: {type(error).__name__}: {error}")


def _python(need: str) -> Check:
    is_met = sys.version_info >= OLDEST_PYTHON
    advice = "" if is_met else f"install Python {'.'.join(map(str, OLDEST_PYTHON))} or newer"
    return Check(need, is_met, platform.python_version(), advice)


def _packages(need: str) -> Check:
    missing = [name for name, number in required_packages().items() if not number]
    found = f"not installed: {', '.join(missing)}" if missing else "all installed"
    return Check(need, not missing, found, f"pip install {' '.join(missing)}" if missing else "")


def _kernel_library(need: str) -> Check:
    return Check(need, True, f"variants {', '.join(available_isas())}")


def _instruction_set(need: str) -> Check:
    isa = chosen_isa()
    slow = "it works, and is slow: the portable kernels are for checking the others" if isa == "portable" else ""
    return Check(need, True, f"{isa} is used", slow)


def _memory(need: str) -> Check:
    available = available_memory_bytes()
    advice = "end what else runs here, or raise the container's limit" if available < LITTLE_MEMORY_BYTES else ""
    found = f"{available / 2**30:.1f} GiB available; `llmserve build --dry-run` says what a checkpoint needs"
    return Check(need, available > 0, found, advice)


def _gpu(need: str) -> Check:
    gpus = visible_gpus()
    oldest = min(tuple(map(int, gpu.compute_capability.split("."))) for gpu in gpus)
    listed = ".".join(map(str, OLDEST_LISTED_CAPABILITY))
    unlisted = f"TensorRT-LLM lists GPUs of compute capability {listed} and newer; on an older one it may not work"
    advice = unlisted if oldest < OLDEST_LISTED_CAPABILITY else ""
    return Check(need, True, "; ".join(map(str, gpus)), advice)


def _tensorrt_llm(need: str) -> Check:
    return Check(need, True, str(library.installed()))


def _tensorrt(need: str) -> Check:
    try:
        is_needed = library.installed().mode is Mode.ENGINE
    except Unsupported:
        return Check(need, False, "comes with TensorRT-LLM")
    if not is_needed:
        return Check(need, True, "not needed by this release of TensorRT-LLM")
    try:
        return Check(need, True, library.tensorrt_version())
    except ImportError as error:
        return Check(need, False, f"cannot be imported: {error}", "install tensorrt-llm again; TensorRT comes with it")


def _mpi(need: str) -> Check:
    found = ctypes.util.find_library("mpi") or _on_library_path("libmpi.so*")
    return Check(need, bool(found), found or "no libmpi", "apt-get install libopenmpi-dev" if not found else "")


def _on_library_path(pattern: str) -> str:
    """Where the dynamic linker looks too; find_library sees that only where a compiler is installed."""
    folders = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    return next((str(path) for folder in folders for path in sorted(Path(folder).glob(pattern))), "")


COMMON: Mapping[str, Callable[[str], Check]] = {"Python": _python, "llmserve's packages": _packages}
NEEDS: Mapping[str, Mapping[str, Callable[[str], Check]]] = {
    "cpu": {
        **COMMON,
        "kernel library": _kernel_library,
        "instruction set": _instruction_set,
        "memory": _memory,
    },
    "tensorrt_llm": {
        **COMMON,
        "NVIDIA GPU and driver": _gpu,
        "TensorRT-LLM": _tensorrt_llm,
        "TensorRT": _tensorrt,
        "MPI": _mpi,
    },
}
