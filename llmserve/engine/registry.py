"""The targets that this version runs, one line each. `builder.targets.registry` has their build-time side."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from llmserve.engine.runtime import Runtime
from llmserve.engine.unknown import UnknownRuntime

RUNTIMES: Mapping[str, str] = {  # target -> module with its `RUNTIME`, imported on demand; the first is the default
    "cpu": "llmserve.engine.cpu.runtime",
    "cuda": "llmserve.engine.cuda.runtime",
    "tensorrt_llm": "llmserve.engine.tensorrt_llm.runtime",
}
DEFAULT_TARGET = next(iter(RUNTIMES))


def runtime_for(target: str) -> Runtime:
    """Returns the runtime of a manifest's target. An unknown target's runtime runs nothing and says what to do."""
    if target not in RUNTIMES:
        return UnknownRuntime(target, tuple(RUNTIMES))
    runtime: Runtime = import_module(RUNTIMES[target]).RUNTIME
    return runtime
