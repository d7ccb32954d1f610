"""transformers in float32, the reference for every contestant."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from tools.quality.job import QualityJob, num_weights


def prepare(job: QualityJob) -> None:
    """Does nothing: the engine opens the checkpoint itself."""


def open_logits(job: QualityJob) -> TransformersLogits:
    return TransformersLogits(job)


class TransformersLogits:
    """See `LogitsModel`."""

    def __init__(self, job: QualityJob) -> None:
        torch.set_num_threads(job.threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=torch.float32).eval()
        self.weight_bytes = 4 * num_weights(job.checkpoint)

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._model(torch.tensor([list(ids)])).logits[0].numpy()
        return found
