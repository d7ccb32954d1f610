"""A checkpoint of a kind as a compile job, without a target: what the writers of the tensorrt_llm target take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmserve.builder.options import BuildOptions
from llmserve.builder.targets.base import CompileJob
from llmserve.checkpoint.plan import plan_weights
from llmserve.checkpoint.reader import Checkpoint
from llmserve.models.number_formats import WeightFormat
from llmserve.models.registry import architecture_for
from llmserve.models.spec import DecoderSpec
from tests.checkpoints import make_checkpoint


@dataclass(frozen=True)
class Opened:
    job: CompileJob
    spec: DecoderSpec
    config: dict[str, Any]

    def param(self, name: str) -> NDArray[Any]:
        return self.job.load(name)


@contextmanager
def opened(path: Path, kind: str, options: BuildOptions, **config: Any) -> Iterator[Opened]:
    with Checkpoint.open(make_checkpoint(path, kind, with_tokenizer=False, **config)) as checkpoint:
        architecture = architecture_for(checkpoint.config)
        spec = architecture.from_hf(checkpoint.config)
        params = architecture.params(spec)
        weights = plan_weights(checkpoint, params, architecture.ignored)
        job = CompileJob(
            architecture.program(spec), params, options, lambda name: weights.load(name, options.dtype), lambda *_: None
        )
        yield Opened(job, spec, checkpoint.config)


def by_the_rule(matrix: NDArray[Any], format: WeightFormat) -> tuple[NDArray[np.int8], NDArray[Any]]:
    """The rounding of TensorRT-LLM's quantizer in numpy, laid out plainly: [inputs, outputs], one scale per output."""
    half = format.most + 1
    weight = matrix.T.astype(np.float32)
    scales = np.abs(weight).max(axis=0) / half
    values = np.clip(np.rint(weight / np.where(scales > 0, scales, 1)), -half, half - 1).astype(np.int8)
    if format.bits == 4:
        values = ((values[:, 0::2] & 0x0F) | (values[:, 1::2] << 4)).astype(np.int8)
    return values, scales.astype(matrix.dtype)


def read_rank(folder: Path, rank: int) -> dict[str, NDArray[Any]]:
    """Read with the safetensors library, which checks the file that we wrote."""
    from safetensors import safe_open

    with safe_open(folder / f"rank{rank}.safetensors", framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping


FLOAT_TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
