"""Requirements of the tensorrt_llm target, for `llmserve doctor`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from llmserve.engine.machine.nvidia import visible_gpus
from llmserve.engine.runtime import Check, Needs
from llmserve.engine.tensorrt_llm import library
from llmserve.engine.tensorrt_llm.library import Mode
from llmserve.errors import Unsupported

OLDEST_LISTED_CAPABILITY = (8, 0)  # Ampere, the oldest in TensorRT-LLM's published support matrix


def _gpu(need: str) -> Check:
    gpus = visible_gpus()
    oldest = min(tuple(map(int, gpu.compute_capability.split("."))) for gpu in gpus)
    listed = ".".join(map(str, OLDEST_LISTED_CAPABILITY))
    unlisted = f"TensorRT-LLM lists GPUs of compute capability {listed} and newer; an older one may not work"
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
    found = _on_library_path("libmpi.so*") or _in_linker_cache("libmpi.so")
    return Check(need, bool(found), found or "no libmpi", "apt-get install libopenmpi-dev" if not found else "")


def _on_library_path(pattern: str) -> str:
    """Searches the folders of LD_LIBRARY_PATH."""
    folders = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    return next((str(path) for folder in folders for path in sorted(Path(folder).glob(pattern))), "")


def _in_linker_cache(prefix: str) -> str:
    """Only asks ldconfig; ctypes.util.find_library would also start a compiler and two linkers."""
    try:
        listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""
    return next((line.split()[0] for line in listed.splitlines() if line.lstrip().startswith(prefix)), "")


NEEDS: Needs = {
    "NVIDIA GPU and driver": _gpu,
    "TensorRT-LLM": _tensorrt_llm,
    "TensorRT": _tensorrt,
    "MPI": _mpi,
}
