"""OpenVINO on the model that its GenAI pipeline opens: activations rounded per 32 inputs where weights are 8 or 4 bits,
its default. The pipeline itself does not return a prompt's logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino
from numpy.typing import NDArray

from tools.benchmark.peers.openvino_genai import WEIGHTS, model_directory, prepare
from tools.quality.job import QualityJob, tensor_shapes

__all__ = ["OpenvinoLogits", "open_logits", "prepare"]

# What is not quantized has the same precision as elsewhere; defaults are bfloat16, if supported, and 8 bits.
PRECISIONS = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f16"}


def open_logits(job: QualityJob) -> OpenvinoLogits:
    return OpenvinoLogits(job)


class OpenvinoLogits:
    """See `LogitsModel`."""

    def __init__(self, job: QualityJob) -> None:
        directory = model_directory(job)
        options = {"INFERENCE_NUM_THREADS": job.threads, **PRECISIONS}
        model = openvino.Core().compile_model(directory / "openvino_model.xml", "CPU", options)
        self._request = model.create_infer_request()
        self.weight_bytes = (directory / WEIGHTS).stat().st_size - _embedding_bytes(job)

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        self._request.reset_state()
        inputs = {
            "input_ids": np.array([ids], np.int64),
            "attention_mask": np.ones((1, len(ids)), np.int64),
            "position_ids": np.arange(len(ids), dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        found: NDArray[np.float32] = self._request.infer(inputs)["logits"][0].copy()
        return found


def _embedding_bytes(job: QualityJob) -> int:
    """The size of an embedding that is not the head, at a byte for each number."""
    shapes = tensor_shapes(job.checkpoint)
    return int(np.prod(shapes["model.embed_tokens.weight"])) if "lm_head.weight" in shapes else 0
