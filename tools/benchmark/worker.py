"""One process that opens one model and measures it.

    python -m tools.benchmark.worker prepare|measure|serve JOB REPORT

Each engine has its own process, so that threads, allocators and peak memory are separate. The report is a file of JSON
lines that are written one by one, so that a crash loses no earlier measurement.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

from tools.benchmark.cells import Model, measure_cell, random_prompts, warm_up
from tools.benchmark.job import Job

Say = Callable[[dict[str, Any]], None]


class EngineModule(Protocol):
    def prepare(self, job: Job) -> None:
        """Makes the files that the engine opens from the checkpoint, unless they exist. Not timed."""
        ...

    def open_model(self, job: Job) -> Model: ...


def measure(engine: EngineModule, job: Job, say: Say) -> None:
    started = time.perf_counter()
    model = engine.open_model(job)
    say(
        {
            "kind": "opened",
            "seconds": time.perf_counter() - started,
            "weight_bytes": model.weight_bytes,
            "kv_bytes_per_token": model.kv_bytes_per_token,
            "versions": model.versions,
        }
    )
    for cell in job.cells:
        warm_up(model, cell, random_prompts(cell, job.shape.vocab, seed=job.seed))
    for number in range(job.passes):
        for cell in job.cells if number == 0 else [cell for cell in job.cells if not cell.is_long]:
            for call in range(cell.calls):
                prompts = random_prompts(cell, job.shape.vocab, seed=job.seed + 1 + number * cell.calls + call)
                sample = measure_cell(model, cell, prompts, max_seconds=job.max_seconds)
                say({"kind": "sample", "cell": cell.name, "tokens": sample.tokens, "seconds": sample.seconds,
                     "ids": sample.ids})  # fmt: skip
    say({"kind": "memory", "peak_bytes": peak_bytes()})


def peak_bytes() -> int:
    """Peak resident memory since this program began; `getrusage` would include its parent's."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].removesuffix("kB")) * 1024


def main(command: str, job_json: str, report: str) -> None:
    job = Job.from_json(job_json)
    engine = cast(EngineModule, importlib.import_module(job.module))
    with Path(report).open("a") as file:

        def say(record: dict[str, Any]) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        if command == "prepare":
            engine.prepare(job)
        elif command == "serve":
            importlib.import_module("tools.benchmark.serving").serve(job, say)
        else:
            measure(engine, job, say)


if __name__ == "__main__":
    main(*sys.argv[1:])
