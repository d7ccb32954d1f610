"""The contestants: engines, the precisions that each offers, and which precisions are compared."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from llmserve.models.number_formats import WEIGHTS

OURS_MODULE = "tools.benchmark.ours"
GGUF, GGUF_BITS = "gguf", 4


@dataclass(frozen=True, slots=True)
class Contestant:
    engine: str
    precision: str  # a key of WEIGHTS; "gguf": the file as it is, Q4_K_M or gpt-oss's MXFP4
    module: str  # has prepare(job) and open_model(job)
    longest_prompt: int = sys.maxsize  # tokens; longer prompts take far too long

    @property
    def is_ours(self) -> bool:
        return self.module == OURS_MODULE

    @property
    def requirement(self) -> str:
        """The module that an `environment.Group` must provide."""
        return self.module.rpartition(".")[2]

    @property
    def bits(self) -> int:
        """Bits of a weight: precisions with equal bits are compared."""
        return GGUF_BITS if self.precision == GGUF else WEIGHTS[self.precision].bits

    @property
    def multiplies_int8(self) -> bool:
        """Whether it could multiply 8-bit integers, so that their rate is the bound."""
        return self.bits <= 8

    def __str__(self) -> str:
        return f"{self.engine} {self.precision}"


def _contestants(
    engine: str, module: str, *precisions: str, longest_prompt: int = sys.maxsize
) -> tuple[Contestant, ...]:
    return tuple(Contestant(engine, precision, module, longest_prompt) for precision in precisions)


OURS = _contestants("llmserve", OURS_MODULE, "float32", "bfloat16", "float16", "int8", "int4")
[OURS_OF_GGUF] = _contestants("llmserve", OURS_MODULE, GGUF)
PEERS = (
    *_contestants("OpenVINO GenAI", "tools.benchmark.peers.openvino_genai", "float16", "int8", "int4"),
    *_contestants("llama.cpp", "tools.benchmark.peers.llama_cpp", "float16", "int8", "int4", GGUF, longest_prompt=2000),
    *_contestants("ik_llama", "tools.benchmark.peers.ik_llama_cpp", "int8", "int4", GGUF),
    *_contestants("transformers", "tools.benchmark.peers.torch_eager", "float32", "bfloat16", longest_prompt=1000),
)
