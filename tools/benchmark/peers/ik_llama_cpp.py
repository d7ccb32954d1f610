"""ik_llama.cpp, a fork of llama.cpp with other CPU kernels, through ik-llama-cpp-python. It runs llama.cpp's files.

It is imported late, because its library has the same name as llama.cpp's, which makes the files.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

from tools.benchmark.job import Job
from tools.benchmark.peers.llama_batches import BatchedModel


def prepare(job: Job) -> None:
    import_module("tools.benchmark.peers.llama_cpp").prepare(job)


def open_model(job: Job) -> IkLlamaModel:
    return IkLlamaModel(job)


class IkLlamaModel(BatchedModel):
    def __init__(self, job: Job) -> None:
        super().__init__(import_module("ik_llama_cpp._ctypes_api"), job)
        self.versions = {"ik-llama-cpp-python": version("ik-llama-cpp-python")}

    def context_params(self, batch: int) -> Any:
        params = super().context_params(batch)
        params.flash_attn = batch == 1  # with several sequences, it crashes the process
        return params
