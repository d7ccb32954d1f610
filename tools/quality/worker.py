"""One process of one contestant: python -m tools.quality.worker prepare|reference|measure JOB

`prepare` makes the contestant's files from the checkpoint, `reference` stores its logits, `measure` compares them with
the stored ones and stores the losses.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from tools.quality.divergence import Logits, divergences, same_best
from tools.quality.job import QualityJob, Texts, num_weights
from tools.quality.losses import Losses


class LogitsModel(Protocol):
    """A network in some engine, teacher-forced."""

    weight_bytes: int  # of the matrices that are multiplied

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Returns logits of every position: [T, V]."""
        ...


class LogitsModule(Protocol):
    def prepare(self, job: QualityJob) -> None: ...

    def open_logits(self, job: QualityJob) -> LogitsModel: ...


def store_reference(model: LogitsModel, job: QualityJob, texts: Texts) -> None:
    staged = job.reference.with_suffix(".partial")
    with staged.open("wb") as file:
        for number, ids in enumerate(texts.ids):
            rows = np.ascontiguousarray(model.logits(ids)[texts.skipped :], np.float32)
            if number == 0:
                shape = (sum(texts.lengths), rows.shape[1])
                header: dict[str, Any] = {"descr": "<f4", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
            file.write(rows.tobytes())
    staged.rename(job.reference)


def measure(model: LogitsModel, job: QualityJob, texts: Texts) -> Losses:
    reference = np.load(job.reference, mmap_mode="r")
    divergence, same, begin = [], [], 0
    for ids, length in zip(texts.ids, texts.lengths, strict=True):
        wanted: Logits = reference[begin : begin + length]
        found = model.logits(ids)[texts.skipped :]
        if found.shape != wanted.shape:
            raise RuntimeError(f"logits have the shape {found.shape} instead of {wanted.shape}")
        divergence.append(divergences(wanted, found))
        same.append(same_best(wanted, found))
        begin += length
    bits = 8 * model.weight_bytes / num_weights(job.checkpoint)
    return Losses(np.concatenate(divergence), np.concatenate(same), np.array(texts.lengths), bits)


def main(command: str, job_json: str) -> None:
    job = QualityJob.from_json(job_json)
    module = cast(LogitsModule, importlib.import_module(job.module))
    if command == "prepare":
        module.prepare(job)
    elif command == "reference":
        store_reference(module.open_logits(job), job, job.texts())
    else:
        measure(module.open_logits(job), job, job.texts()).save(job.losses)


if __name__ == "__main__":
    main(*sys.argv[1:])
