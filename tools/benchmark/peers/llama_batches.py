"""Common parts of llama.cpp and ik_llama.cpp: one `llama_decode` per step, with many sequences in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tools.benchmark.job import Job
from tools.benchmark.peers.gguf_file import gguf_path, read_by_one_token

MAX_BATCH_TOKENS = 2048
KV_BYTES = 2  # float16, the default of both


class BatchedModel:
    """See `Model`. A context has a fixed number of sequences, so each cell gets its own, before timing starts."""

    def __init__(self, library: Any, job: Job) -> None:
        """`library`: a module with the functions of llama.h."""
        library.llama_backend_init()
        self._library = library
        path = gguf_path(job)
        self._model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"{path.name} could not be opened")
        self.weight_bytes = read_by_one_token(path)
        self.kv_bytes_per_token = float(KV_BYTES * job.shape.kv_elements_per_token)
        self._threads = job.threads
        self._vocab = job.shape.vocab
        self._batch = library.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)
        self._context: Any = None
        self._length = 0
        self._ids: list[int] = []

    def context_params(self, batch: int) -> Any:
        """The library's defaults, except for sizes and threads."""
        return self._library.llama_context_default_params()

    def prepare(self, batch: int, max_tokens: int) -> None:
        params = self.context_params(batch)
        params.n_ctx = batch * -(-max_tokens // 256) * 256
        params.n_batch = MAX_BATCH_TOKENS
        params.n_seq_max = batch
        params.n_threads = params.n_threads_batch = self._threads
        self._context = self._library.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"there is no context for {batch} sequences of {max_tokens} tokens")
        self._length = 0

    def start(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        return self._advance(prompts)

    def step(self) -> list[int]:
        return self._advance([(token,) for token in self._ids])

    def release(self) -> None:
        self._library.llama_free(self._context)
        self._context = None

    def _advance(self, new_ids: Sequence[Sequence[int]]) -> list[int]:
        """Processes the tokens of one sequence after another, as many per call as the context allows."""
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
        if status := self._library.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed with status {status}")
        return {sequence: self._best(place) for sequence, place in last.items()}

    def _best(self, row: int) -> int:
        logits = self._library.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())
