"""llama.cpp with a float16 cache: one `llama_decode` for each text, with logits of all positions."""

from __future__ import annotations

import json
from collections.abc import Sequence

import gguf
import llama_cpp as llama
import numpy as np
from numpy.typing import NDArray

from tools.benchmark.peers.gguf_file import gguf_path
from tools.benchmark.peers.llama_cpp import prepare
from tools.quality.job import QualityJob

__all__ = ["LlamaCppLogits", "open_logits", "prepare"]


def open_logits(job: QualityJob) -> LlamaCppLogits:
    return LlamaCppLogits(job)


class LlamaCppLogits:
    """See `LogitsModel`."""

    def __init__(self, job: QualityJob) -> None:
        path = gguf_path(job)
        llama.llama_backend_init()
        model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        if not model:
            raise RuntimeError(f"llama.cpp could not open {path.name}")
        longest = max(map(len, job.texts().ids))
        params = llama.llama_context_default_params()
        params.n_ctx = params.n_batch = -(-longest // 256) * 256
        params.n_threads = params.n_threads_batch = job.threads
        self._context = llama.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp could not make a context for {longest} tokens")
        self._batch = llama.llama_batch_init(params.n_batch, 0, 1)
        self._vocab = int(json.loads((job.checkpoint / "config.json").read_text())["vocab_size"])
        matrices = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) > 1}
        if "output.weight" in matrices:
            del matrices["token_embd.weight"]
        self.weight_bytes = sum(int(tensor.n_bytes) for tensor in matrices.values())

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        batch = self._batch
        for position, token in enumerate(ids):
            batch.token[position], batch.pos[position] = token, position
            batch.n_seq_id[position], batch.seq_id[position][0], batch.logits[position] = 1, 0, 1
        batch.n_tokens = len(ids)
        if status := llama.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed with status {status}")
        rows = llama.llama_get_logits(self._context)
        return np.ctypeslib.as_array(rows, (len(ids), self._vocab)).copy()
