"""transformers on a GPU, as optimized by its users: a static cache, and the forward pass of a step compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

from tools.benchmark.job import Job
from tools.benchmark.peers.torch_eager import EagerModel

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def prepare(job: Job) -> None:
    """Does nothing: the engine opens the checkpoint itself, and compiles during the warm-up."""


def open_model(job: Job) -> CompiledModel:
    return CompiledModel(job, "cuda", lambda forward: torch.compile(forward, mode="reduce-overhead", fullgraph=True))


class CompiledModel(EagerModel):
    """See `Model`. Prompts are computed without compilation, like in `generate`."""

    def __init__(self, job: Job, device: str, compile_: Compile) -> None:
        super().__init__(job)
        self._model.to(device)
        self._device = device
        self._compiled = compile_(self._model.__call__)
        self._caches: dict[tuple[int, int], transformers.StaticCache] = {}
        self._position = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.versions["device"] = torch.cuda.get_device_name() if device == "cuda" else device

    @torch.inference_mode()
    def prepare(self, batch: int, max_tokens: int) -> None:
        """Reuses the cache for a size, because the recorded step uses its memory."""
        known = self._caches.get((batch, max_tokens))
        if known is None:
            known = transformers.StaticCache(config=self._model.config, max_cache_len=max_tokens)
        else:
            known.reset()
        self._cache = self._caches[batch, max_tokens] = known

    def start(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        self._position.fill_(len(prompts[0]))
        return self._next(self._model, torch.tensor(prompts, device=self._device))

    def step(self) -> list[int]:
        ids = self._next(self._compiled, self._ids[:, None], position_ids=self._position)
        self._position += 1
        return ids

    @torch.inference_mode()
    def _next(self, model: Callable[..., Any], ids: torch.Tensor, **more: torch.Tensor) -> list[int]:
        output = model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1, **more)
        self._ids = output.logits[:, -1].argmax(-1)  # a copy, because the recorded step overwrites its output
        return [int(i) for i in self._ids.tolist()]
