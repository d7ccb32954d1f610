"""Options that only the cuda target has."""

from __future__ import annotations

from dataclasses import dataclass

from llmserve.builder.flag import Flag, option
from llmserve.builder.targets.options import TargetOptions

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")  # that the tests compile for


@dataclass(frozen=True, slots=True)
class CudaOptions(TargetOptions):
    gpu: str = option(
        "", Flag(f"GPU architectures, separated by commas: {', '.join(ARCHITECTURES)}", default_text="this machine's")
    )

    kernels: str = option(
        "",
        Flag(
            "File of compiled kernels, made with --kernels-only elsewhere: no compiler is needed then",
            default_text="none",
            leaves_a_trace=False,  # the kernels themselves do, and their compiler's version
            is_path=True,
        ),
    )

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name.strip() for name in self.gpu.split(",") if name.strip()))

    def problems(self) -> list[str]:
        unknown = [name for name in self.architectures if name not in ARCHITECTURES]
        return [
            *TargetOptions.problems(self),
            *(f"gpu {name} is none of {', '.join(ARCHITECTURES)}" for name in unknown),
        ]

    def words_of_the_name(self) -> tuple[str, ...]:
        return ("cuda",)
