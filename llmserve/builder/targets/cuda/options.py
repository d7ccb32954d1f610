"""Options that only the cuda target has."""

from __future__ import annotations

from dataclasses import dataclass

from llmserve.builder.flag import Flag, option
from llmserve.builder.targets.options import TargetOptions

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")  # architectures that the tests compile for
GPUS = {  # by their common names, from NVIDIA's list of compute capabilities
    "A100": "sm_80", "A30": "sm_80", "A10": "sm_86", "A40": "sm_86", "A6000": "sm_86", "3090": "sm_86", "L4": "sm_89",
    "L40": "sm_89", "L40S": "sm_89", "4090": "sm_89", "H100": "sm_90", "H200": "sm_90", "GH200": "sm_90",
    "B200": "sm_100", "GB200": "sm_100", "5090": "sm_120",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CudaOptions(TargetOptions):
    gpu: str = option(
        "", Flag(f"GPU architectures, separated by commas: {', '.join(ARCHITECTURES)}", default_text="this machine's")
    )

    kernels: str = option(
        "",
        Flag(
            "File of compiled kernels, written elsewhere with --kernels-only; no compiler is needed",
            default_text="none",
            leaves_a_trace=False,  # the kernels and their compiler's version have an effect
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
            *(f"gpu {name} is unknown; {_hint(name)}" for name in unknown),
        ]

    def words_of_the_name(self) -> tuple[str, ...]:
        return ("cuda",)


def _hint(name: str) -> str:
    words = name.upper().replace("-", " ").replace("_", " ").split()
    found = next((GPUS[word] for word in words if word in GPUS), None)
    return f"write {found}" if found else f"write one of {', '.join(ARCHITECTURES)}"
