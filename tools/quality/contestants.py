"""The contestants, and those that ours are compared with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Contestant:
    name: str
    engine: str  # with `precision`: its name in `make bench-peers`
    precision: str
    module: str  # of `tools.quality.engines`
    rivals: tuple[str, ...] = ()  # for ours: names of contestants that it must beat

    @property
    def is_ours(self) -> bool:
        return self.engine == "llmserve"

    @property
    def requirement(self) -> str:
        """The module that `tools.benchmark.environment` must provide."""
        return REQUIREMENTS.get(self.module, "")


CALIBRATED = "-calibrated"  # suffix of a precision of ours: built with --calibration-data
OURS, OPENVINO, LLAMA = "ours", "openvino_logits", "llama_cpp_logits"
REQUIREMENTS = {OPENVINO: "openvino_genai", LLAMA: "llama_cpp", "transformers_float32": "torch_eager"}
REFERENCE = Contestant("transformers float32", "transformers", "float32", "transformers_float32")
CONTESTANTS = (
    Contestant("llmserve float16", "llmserve", "float16", OURS),
    Contestant("llmserve int8", "llmserve", "int8", OURS, ("OpenVINO int8", "llama.cpp Q8_0")),
    Contestant(
        "llmserve int8, calibrated", "llmserve", f"int8{CALIBRATED}", OURS, ("OpenVINO int8", "llama.cpp Q8_0")
    ),
    Contestant("OpenVINO int8", "OpenVINO GenAI", "int8", OPENVINO),
    Contestant("llama.cpp Q8_0", "llama.cpp", "int8", LLAMA),
    Contestant(
        "llmserve int4", "llmserve", "int4", OURS, ("llama.cpp Q4_0", "llama.cpp Q4_K_M", "OpenVINO int4")
    ),
    Contestant(
        "llmserve int4, calibrated", "llmserve", f"int4{CALIBRATED}", OURS,
        ("llama.cpp Q4_0", "llama.cpp Q4_K_M", "OpenVINO int4"),
    ),
    Contestant("OpenVINO int4", "OpenVINO GenAI", "int4", OPENVINO),
    Contestant("llama.cpp Q4_0", "llama.cpp", "int4", LLAMA),
    Contestant("llama.cpp Q4_K_M", "llama.cpp", "Q4_K_M", LLAMA),
)  # fmt: skip
