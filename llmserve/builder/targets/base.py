"""The seam between the builder and a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from llmserve.builder.options import BuildOptions
from llmserve.builder.progress import Progress
from llmserve.models.graph import Program
from llmserve.models.spec import Param


@dataclass(frozen=True, slots=True)
class CompileJob:
    """Everything a target needs to write one engine file."""

    program: Program
    params: Sequence[Param]
    options: BuildOptions  # max_seq_len resolved, never 0
    load: Callable[[str], NDArray[Any]]  # parameter name -> array in `options.dtype` (bfloat16 is ml_dtypes.bfloat16)
    advance: Callable[[str, int], None]  # progress: (what, bytes written since the last call)


class Target(Protocol):
    name: str

    def problems(self, program: Program, params: Sequence[Param], options: BuildOptions) -> list[str]:
        """Why this network cannot be compiled with these options; each says what to do. Empty when it can."""
        ...

    def engine_bytes(self, program: Program, params: Sequence[Param], options: BuildOptions) -> int:
        """Size of the engine file, for the plan and the progress bar."""
        ...

    def compile(self, job: CompileJob, out: Path) -> Mapping[str, Any]:
        """Write the engine file `out` and return device facts for the manifest.

        Loads each parameter once and holds about one at a time.
        """
        ...

    def tune(self, engine_file: Path, earlier: Path, progress: Progress) -> None:
        """Measure what makes the engine faster here and leave it beside the engine file; no result may depend on it.

        `earlier`: what a previous build of the same directory left, if it is there.
        """
        ...
