"""A target whose engine file is its parameters' bytes, one after the other; and ways to make it stumble."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmserve.builder.options import BuildOptions
from llmserve.builder.progress import Progress
from llmserve.builder.quantization import quantized_params, stored_names
from llmserve.builder.targets.base import CompileJob
from llmserve.engine.artifact import CACHE_FILE
from llmserve.models.graph import Program
from llmserve.models.spec import Param


@dataclass
class FakeTarget:
    name: str = "fake"
    has_selftest: bool = True
    refusals: list[str] = field(default_factory=list)
    after_each: Callable[[str], None] = lambda name: None  # called after each parameter that was written

    def problems(self, program: Program, params: Sequence[Param], options: BuildOptions) -> list[str]:
        return self.refusals

    def notes(self, options: BuildOptions) -> list[str]:
        return []

    def machine_problems(self) -> list[str]:
        return []

    def engine_bytes(self, program: Program, params: Sequence[Param], options: BuildOptions) -> int:
        stored = set(stored_names(params, quantized_params(program, params, options)).values())
        num_elements = sum(param.num_elements for param in params if param.name in stored)
        return num_elements * (4 if options.dtype == "float32" else 2)

    def compile(self, job: CompileJob, out: Path) -> Mapping[str, Any]:
        with out.open("wb") as file:
            for param in job.params:
                array = job.load(param.name)
                file.write(array.tobytes())
                job.advance(param.name, array.nbytes)
                self.after_each(param.name)
        return {"isa": "none"}

    def tune(self, engine_file: Path, earlier: Path, progress: Progress) -> None:
        engine_file.with_name(CACHE_FILE).write_text("tuned")
