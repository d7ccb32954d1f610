"""A target whose engine file is its parameters' bytes, one after the other; and ways to make it stumble."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmserve.builder.options import BuildOptions
from llmserve.builder.quantization import WeightPart, stored_names
from llmserve.builder.targets.base import CompileJob, Network, Target, no_kernels
from llmserve.engine.directory.artifact import CACHE_FILE, ENGINE_FILE
from llmserve.models.graph import Program
from llmserve.models.number_formats import NumberFormat
from llmserve.models.spec import DecoderSpec, HfConfig, Param
from llmserve.progress import Progress


@dataclass
class FakeTarget:
    name: str = "fake"
    times_tactics: bool = False
    has_selftest: bool = True
    rounds_activations: bool = False
    rounds_tables: bool = False
    refusals: list[str] = field(default_factory=list)
    memory_bytes: int = 2**40
    after_each: Callable[[str], None] = lambda name: None  # called after each parameter that was written

    def problems(self, program: Program, params: Sequence[Param], options: BuildOptions) -> list[str]:
        return self.refusals

    def notes(self, options: BuildOptions) -> list[str]:
        return []

    def machine_problems(self, options: BuildOptions) -> list[str]:
        return []

    def engine_bytes(self, network: Network, parts: Mapping[str, Sequence[WeightPart]]) -> int:
        stored = set(stored_names(network.params, parts).values())
        num_elements = sum(param.num_elements for param in network.params if param.name in stored)
        return network.options.floats.num_bytes(num_elements)

    def cache_format(self, options: BuildOptions) -> NumberFormat:
        return options.cache()

    def kv_bytes_per_token(self, program: Program, options: BuildOptions) -> int:
        cache = program.cache
        return options.floats.num_bytes(2 * cache.num_layers * cache.num_kv_heads * cache.head_dim)

    def kv_bytes_of(self, program: Program, options: BuildOptions, num_tokens: int) -> int:
        return options.in_whole_blocks(num_tokens) * self.kv_bytes_per_token(program, options)

    def available_bytes(self) -> int:
        return self.memory_bytes

    def read_bytes_per_s(self) -> float:
        return 1e9

    def compile(self, job: CompileJob, directory: Path) -> Mapping[str, Any]:
        with (directory / ENGINE_FILE).open("wb") as file:
            for param in job.params:
                array = job.load(param.name)
                file.write(array.tobytes())
                job.advance(param.name, array.nbytes)
                self.after_each(param.name)
        return {"isa": "none"}

    def compile_kernels(self, network: Network, output: Path, progress: Progress, threads: int) -> str:
        raise no_kernels(self.name)

    def tune(self, directory: Path, earlier: Path, progress: Progress) -> None:
        (directory / CACHE_FILE).write_text("tuned")


def make_target(spec: DecoderSpec, config: HfConfig) -> Target:
    """As a registry finds it. What runs its engines is `llmserve.engine.fake.runtime`, which has no self-test."""
    return FakeTarget(has_selftest=False)
