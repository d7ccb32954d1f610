"""llama.cpp through the low-level interface of llama-cpp-python: one `llama_decode` per step, many sequences in it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as llama
import numpy as np

from tools.benchmark.job import Job, Prepared
from tools.benchmark.peers.gguf_file import write_adapter_gguf, write_gguf

# What llama.cpp's users would take; its quantizer keeps the output matrix of Q4_0 in Q6_K.
FILE_TYPES = {
    "int8": ("Q8_0", llama.LLAMA_FTYPE_MOSTLY_Q8_0),
    "int4": ("Q4_0", llama.LLAMA_FTYPE_MOSTLY_Q4_0),
    "Q4_K_M": ("Q4_K_M", llama.LLAMA_FTYPE_MOSTLY_Q4_K_M),
}
MAX_BATCH_TOKENS = 2048
KV_BYTES = 2  # float16, the default


def gguf_path(job: Prepared) -> Path:
    return job.file(f"{FILE_TYPES[job.precision][0] if job.precision in FILE_TYPES else 'F16'}.gguf")


def prepare(job: Prepared) -> None:
    path, source = gguf_path(job), job.file("F16.gguf")
    if not source.is_file():
        write_gguf(job.checkpoint, staged := source.with_suffix(".partial"))
        staged.rename(source)
    if not path.is_file():
        params = llama.llama_model_quantize_default_params()
        params.ftype = FILE_TYPES[job.precision][1]
        params.nthread = job.threads
        staged = path.with_suffix(".partial")
        if llama.llama_model_quantize(str(source).encode(), str(staged).encode(), ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp could not quantize {source.name} to {path.name}")
        staged.rename(path)


def read_by_one_token(path: Path) -> int:
    """Bytes: all weights, and of experts those that are chosen; of an embedding that is not the head only a row."""
    file = gguf.GGUFReader(path)
    fields = {name.rpartition(".")[2]: field.contents() for name, field in file.fields.items()}
    share = fields.get("expert_used_count", 1) / fields.get("expert_count", 1)
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in file.tensors}
    if "output.weight" in sizes:
        del sizes["token_embd.weight"]
    return round(sum(size * (share if "_exps." in name else 1) for name, size in sizes.items()))


def open_model(job: Job) -> LlamaCppModel:
    return LlamaCppModel(job)


class LlamaCppModel:
    """See `Model`. A context has a fixed number of sequences: each cell gets its own, before the clock starts."""

    def __init__(self, job: Job) -> None:
        path = gguf_path(job)
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp could not open {path.name}")
        self.weight_bytes = read_by_one_token(path)
        self.kv_bytes_per_token = float(KV_BYTES * job.shape.kv_elements_per_token)
        self.versions = {"llama-cpp-python": version("llama-cpp-python")}
        self._adapter = self._opened_adapter(job.folder / job.adapter) if job.adapter else None
        self._threads = job.threads
        self._vocab = job.shape.vocab
        self._batch = llama.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)
        self._context = None
        self._length = 0
        self._ids: list[int] = []

    def prepare(self, batch: int, max_tokens: int) -> None:
        params = llama.llama_context_default_params()
        params.n_ctx = batch * -(-max_tokens // 256) * 256
        params.n_batch = MAX_BATCH_TOKENS
        params.n_seq_max = batch
        params.n_threads = params.n_threads_batch = self._threads
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp could not make a context for {batch} sequences of {max_tokens} tokens")
        self._length = 0
        if self._adapter:
            adapters, scales = (type(self._adapter) * 1)(self._adapter), (ctypes.c_float * 1)(1.0)
            if llama.llama_set_adapters_lora(self._context, adapters, 1, scales):
                raise RuntimeError("llama.cpp could not use the adapter")

    def start(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        return self._advance(prompts)

    def step(self) -> list[int]:
        return self._advance([(token,) for token in self._ids])

    def release(self) -> None:
        llama.llama_free(self._context)
        self._context = None

    def _opened_adapter(self, folder: Path) -> Any:
        path = folder / "adapter.gguf"
        write_adapter_gguf(folder, path)
        adapter = llama.llama_adapter_lora_init(self._model, str(path).encode())
        if not adapter:
            raise RuntimeError(f"llama.cpp could not open {path}")
        return adapter

    def _advance(self, new_ids: Sequence[Sequence[int]]) -> list[int]:
        """Tokens of one sequence after another, as many in a call as the context takes."""
        best: dict[int, int] = {}
        tokens = [
            (sequence, position, token, position == self._length + len(ids) - 1)
            for sequence, ids in enumerate(new_ids)
            for position, token in enumerate(ids, self._length)
        ]
        for begin in range(0, len(tokens), MAX_BATCH_TOKENS):
            best |= self._decode(tokens[begin : begin + MAX_BATCH_TOKENS])
        self._length += len(new_ids[0])
        self._ids = [best[sequence] for sequence in range(len(new_ids))]
        return self._ids

    def _decode(self, tokens: Sequence[tuple[int, int, int, bool]]) -> dict[int, int]:
        """(sequence, position, token, whether a token follows): the following tokens by sequence."""
        batch, last = self._batch, {}
        for place, (sequence, position, token, is_last) in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, position
            batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, sequence, is_last
            if is_last:
                last[sequence] = place
        batch.n_tokens = len(tokens)
        if status := llama.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed with status {status}")
        return {sequence: self._best(place) for sequence, place in last.items()}

    def _best(self, row: int) -> int:
        logits = llama.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())
