"""The registry of targets, one line each. `engine.registry` has their run-time side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmserve.builder.targets.cpu.options import CpuOptions
from llmserve.builder.targets.cuda.options import CudaOptions
from llmserve.builder.targets.options import TargetOptions
from llmserve.builder.targets.tensorrt_llm.options import TensorrtLlmOptions


@dataclass(frozen=True, slots=True)
class BuildRoom:
    """`module` has `make_target(spec, config) -> Target`; it is only imported for a build."""

    options: type[TargetOptions]
    module: str


TARGETS: Mapping[str, BuildRoom] = {
    "cpu": BuildRoom(CpuOptions, "llmserve.builder.targets.cpu.target"),
    "cuda": BuildRoom(CudaOptions, "llmserve.builder.targets.cuda.target"),
    "tensorrt_llm": BuildRoom(TensorrtLlmOptions, "llmserve.builder.targets.tensorrt_llm.target"),
}
