"""Our CPU engine: logits of every position, computed as in its self-test."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.plan import plan_build
from llmserve.engine.cpu.runner import CpuRunner, read_header
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.selftest import prompt_logits
from tools.benchmark.ours import build_options
from tools.quality.contestants import CALIBRATED
from tools.quality.job import QualityJob


def prepare(job: QualityJob) -> None:
    """Always builds again, because the builder's rounding is measured."""
    directory = job.file(job.precision)
    shutil.rmtree(directory, ignore_errors=True)
    build_engine(job.checkpoint, directory, options_of(job))


def options_of(job: QualityJob) -> BuildOptions:
    options = build_options(job.precision.removesuffix(CALIBRATED))
    return replace(options, calibration_data=str(job.calibration)) if job.precision.endswith(CALIBRATED) else options


def open_logits(job: QualityJob) -> OurLogits:
    return OurLogits(job)


class OurLogits:
    """See `LogitsModel`."""

    def __init__(self, job: QualityJob) -> None:
        path = EngineDirectory.open(job.file(job.precision)).engine_file
        longest = max(map(len, job.texts().ids))
        num_blocks = -(-longest // read_header(path).block_size)
        self._runner = CpuRunner.open(path, num_blocks=num_blocks, threads=job.threads)
        self.weight_bytes = plan_build(job.checkpoint, options_of(job), measure=lambda: 0.0).weight_bytes

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        return prompt_logits(self._runner, list(ids), sequence_id=0)
