"""Whether an engine can run on this machine; if not, in words, with what to do."""

from __future__ import annotations

from llmserve.engine.artifact import EngineDirectory
from llmserve.engine.cpu.library import load_library
from llmserve.engine.open import CPU_TARGET, GPU_TARGET, EngineSettings, num_kv_blocks
from llmserve.engine.tensorrt_llm.fits import fit_problems
from llmserve.errors import LlmserveError


def problems_here(directory: EngineDirectory) -> list[str]:
    """Everything that keeps this engine from running here; empty when nothing does. Opens no engine."""
    target = directory.manifest.target
    if target == GPU_TARGET:
        return fit_problems(directory)
    if target != CPU_TARGET:
        return [f"it is for target {target!r}, which this version does not execute; build it for another target"]
    return _cpu_problems(directory)


def _cpu_problems(directory: EngineDirectory) -> list[str]:
    """The kernels, the engine file's version, and memory for the weights and one sequence."""
    found = []
    for ask in (load_library, lambda: num_kv_blocks(directory.engine_file, directory.info(), EngineSettings())):
        try:
            ask()
        except LlmserveError as error:
            found.append(str(error))
    return found
