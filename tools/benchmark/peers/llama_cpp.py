"""llama.cpp through the low-level interface of llama-cpp-python."""

from __future__ import annotations

import ctypes
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp as llama

from tools.benchmark.job import Job, Prepared
from tools.benchmark.peers.gguf_file import file_type, gguf_path, write_adapter_gguf, write_gguf
from tools.benchmark.peers.llama_batches import BatchedModel


def prepare(job: Prepared) -> None:
    path, source = gguf_path(job), job.file("F16.gguf")
    if not source.is_file():
        write_gguf(job.checkpoint, staged := source.with_suffix(".partial"))
        staged.rename(source)
    if not path.is_file():
        params = llama.llama_model_quantize_default_params()
        params.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{file_type(job)}")
        params.nthread = job.threads
        staged = path.with_suffix(".partial")
        if llama.llama_model_quantize(str(source).encode(), str(staged).encode(), ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp could not quantize {source.name} to {path.name}")
        staged.rename(path)


def open_model(job: Job) -> LlamaCppModel:
    return LlamaCppModel(job)


class LlamaCppModel(BatchedModel):
    def __init__(self, job: Job) -> None:
        super().__init__(llama, job)
        self.versions = {"llama-cpp-python": version("llama-cpp-python")}
        self._adapter = self._opened_adapter(job.folder / job.adapter) if job.adapter else None

    def prepare(self, batch: int, max_tokens: int) -> None:
        super().prepare(batch, max_tokens)
        if self._adapter:
            adapters, scales = (type(self._adapter) * 1)(self._adapter), (ctypes.c_float * 1)(1.0)
            if llama.llama_set_adapters_lora(self._context, adapters, 1, scales):
                raise RuntimeError("llama.cpp could not use the adapter")

    def _opened_adapter(self, folder: Path) -> Any:
        path = folder / "adapter.gguf"
        write_adapter_gguf(folder, path)
        adapter = llama.llama_adapter_lora_init(self._model, str(path).encode())
        if not adapter:
            raise RuntimeError(f"llama.cpp could not open {path}")
        return adapter
