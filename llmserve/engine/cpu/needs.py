"""Requirements of the cpu target, for `llmserve doctor`."""

from __future__ import annotations

from llmserve.engine.machine.memory import available_memory_bytes
from llmserve.engine.native.library import available_isas, chosen_isa
from llmserve.engine.runtime import Check, Needs

LITTLE_MEMORY_BYTES = 2**30


def _kernel_library(need: str) -> Check:
    return Check(need, True, f"variants {', '.join(available_isas())}")


def _instruction_set(need: str) -> Check:
    isa = chosen_isa()
    slow = "it works, but slowly: the portable kernels are only a reference" if isa == "portable" else ""
    return Check(need, True, f"{isa} is used", slow)


def _memory(need: str) -> Check:
    available = available_memory_bytes()
    advice = "stop other programs, or raise the container's memory limit" if available < LITTLE_MEMORY_BYTES else ""
    found = f"{available / 2**30:.1f} GiB available; `llmserve build --dry-run` shows what a checkpoint needs"
    return Check(need, available > 0, found, advice)


NEEDS: Needs = {"kernel library": _kernel_library, "instruction set": _instruction_set, "memory": _memory}
