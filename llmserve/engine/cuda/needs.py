"""Requirements of the cuda target to run engines, for `llmserve doctor`. Building requires a compiler."""

from __future__ import annotations

from importlib import metadata

from llmserve.engine.cuda.bindings import driver_api
from llmserve.engine.machine.nvidia import visible_gpus
from llmserve.engine.runtime import Check, Needs

OLDEST_CAPABILITY = (8, 0)
UNTRIED = "experimental: tested only on an H200"


def _gpu(need: str) -> Check:
    gpus = visible_gpus()
    oldest = min(tuple(map(int, gpu.compute_capability.split("."))) for gpu in gpus)
    listed = ".".join(map(str, OLDEST_CAPABILITY))
    advice = f"kernels are for compute capability {listed} and newer" if oldest < OLDEST_CAPABILITY else UNTRIED
    return Check(need, oldest >= OLDEST_CAPABILITY, "; ".join(map(str, gpus)), advice)


def _bindings(need: str) -> Check:
    driver_api()
    return Check(need, True, f"cuda-bindings {metadata.version('cuda-bindings')}")


def _compiler(need: str) -> Check:
    """Not required to run an engine."""
    try:
        return Check(need, True, f"triton {metadata.version('triton')}")
    except metadata.PackageNotFoundError:
        return Check(need, True, "none; required to build on this machine", "pip install 'llmserve[cuda]'")


NEEDS: Needs = {"NVIDIA GPU and driver": _gpu, "NVIDIA's bindings": _bindings, "kernel compiler": _compiler}
