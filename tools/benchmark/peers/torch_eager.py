"""transformers on torch, as used on a CPU: eager, scaled dot-product attention, a dynamic cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers

from llmserve.engine.machine.cores import num_threads
from tools.benchmark.job import Job

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def prepare(job: Job) -> None:
    """Does nothing: the engine opens the checkpoint itself."""


def open_model(job: Job) -> EagerModel:
    return EagerModel(job)


class EagerModel:
    """See `Model`."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(num_threads(job.threads))
        dtype = DTYPES[job.precision]
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            job.checkpoint, dtype=dtype, attn_implementation="sdpa"
        ).eval()
        self.weight_bytes = dtype.itemsize * (job.shape.num_parameters - job.shape.head_products)
        self.kv_bytes_per_token = float(dtype.itemsize * job.shape.kv_elements_per_token)
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        self._cache: Any = None
        self._ids = torch.empty(0, dtype=torch.int64)

    def prepare(self, batch: int, max_tokens: int) -> None:
        self._cache = transformers.DynamicCache()

    def start(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        return self._advance(torch.tensor(prompts))

    def step(self) -> list[int]:
        return self._advance(self._ids[:, None])

    def release(self) -> None:
        self._cache = None

    @torch.inference_mode()
    def _advance(self, ids: torch.Tensor) -> list[int]:
        output = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._ids = output.logits[:, -1].argmax(-1)
        return [int(i) for i in self._ids.tolist()]
