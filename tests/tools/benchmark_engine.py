"""A contestant for tests: an engine of its own for `tools.benchmark.worker` that answers by counting.

Precision "float32" works, "float16" fails to prepare, "int8" fails after its first cell, "int4" kills its process.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

from tools.benchmark.job import Job
from tools.benchmark.worker import EngineModule, measure


def prepare(job: Job) -> None:
    if job.precision == "float16":
        raise RuntimeError("no converter for float16")


def open_model(job: Job) -> CountingModel:
    if job.precision == "int4":
        print("about to crash", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return CountingModel(fails=job.precision == "int8")


def measured(job: Job) -> dict[str, int]:
    """How often the worker measures each cell."""
    records: list[dict[str, Any]] = []
    measure(cast(EngineModule, sys.modules[__name__]), job, records.append)
    return Counter(record["cell"] for record in records if record["kind"] == "sample")


class CountingModel:
    weight_bytes = 1000
    kv_bytes_per_token = 2.0

    def __init__(self, *, fails: bool) -> None:
        self.versions = {"counting": "1"}
        self._fails = fails
        self._batch = 0

    def prepare(self, batch: int, max_tokens: int) -> None:
        self._batch = batch

    def start(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        assert len(prompts) == self._batch
        if self._fails and self._batch > 1:
            raise RuntimeError("only one at a time")
        return [len(prompt) for prompt in prompts]

    def step(self) -> list[int]:
        return [7] * self._batch

    def release(self) -> None:
        self._batch = 0
