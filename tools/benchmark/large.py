"""Builds, opens, runs and deletes a network of a commonly served size; each precision in its own process.

python -m tools.benchmark.large JOB REPORT
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmserve.builder.build import build_engine
from llmserve.engine.directory.artifact import ENGINE_FILE
from llmserve.engine.machine.memory import available_memory_bytes
from llmserve.models.number_formats import WEIGHTS
from llmserve.progress import Phase
from tools.benchmark import ours
from tools.benchmark.bounds import Limits, bounds
from tools.benchmark.cells import Cell, measure_cell, random_prompts, warm_up
from tools.benchmark.checkpoint import make_checkpoint
from tools.benchmark.contestants import Contestant
from tools.benchmark.environment import last_lines
from tools.benchmark.job import Job
from tools.benchmark.markdown import table

SHAPE = "7b"
PRECISIONS = ("int8", "float16")
DECODE = Cell("decode", 1, 32, 64)
SPARE_BYTES = 2 * 2**30  # on disk, and in memory in addition to the engine
SAMPLE_S = 0.05
TIMEOUT_S = 3600
GB = 1e9

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """`record` is the process's report; it is empty if `reason` says why there is none."""

    name: str
    record: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


class PhaseClock:
    """Seconds of each phase of a build."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._name, self._began = "", 0.0

    def expect(self, phases: Sequence[Phase]) -> None:
        pass

    def phase(self, name: str, total_bytes: int) -> None:
        self.finish()
        self._name, self._began = name, time.perf_counter()

    def advance(self, what: str, num_bytes: int) -> None:
        pass

    def finish(self) -> None:
        if self._name:
            self.seconds[self._name] = time.perf_counter() - self._began


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Yields a list whose entry is this process's peak memory so far in bytes, without mapped files."""
    peaks, ended = [_anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_S):
            peaks[0] = max(peaks[0], _anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peaks
    finally:
        ended.set()
        watcher.join()


def _anonymous_bytes() -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].removesuffix("kB")) * 1024


def build_and_measure(job: Job) -> dict[str, Any]:
    """Runs in its own process."""
    clock, directory = PhaseClock(), ours.engine_directory(job)
    began, cpu_began = time.perf_counter(), time.process_time()
    with peak_memory() as peaks:
        build_engine(job.checkpoint, directory, ours.build_options(job.precision), progress=clock, threads=job.threads)
    clock.finish()
    record = {
        "build_s": time.perf_counter() - began,
        "build_cpu_s": time.process_time() - cpu_began,
        "phases_s": clock.seconds,
        "build_peak_bytes": peaks[0],
        "file_bytes": (directory / ENGINE_FILE).stat().st_size,
    }
    began = time.perf_counter()
    model = ours.open_model(job)
    record |= {"open_s": time.perf_counter() - began, "weight_bytes": model.weight_bytes}
    prompts = random_prompts(DECODE, job.shape.vocab, seed=job.seed)
    warm_up(model, DECODE, prompts)
    sample = measure_cell(model, DECODE, prompts, max_seconds=job.max_seconds)
    return record | {"tokens_per_s": sample.rate, "kv_bytes_per_token": model.kv_bytes_per_token}


def measure_large(
    contestants: Sequence[Contestant], job: Job, measure_limits: Callable[[], dict[str, float]], say: Say
) -> list[Finding]:
    """`job` has folder, threads and seconds per cell. Removes all files that it creates."""
    job = replace(job, shape_name=SHAPE, cells=(DECODE,))
    chosen = [one for one in contestants if one.precision in PRECISIONS]
    had_checkpoint = job.checkpoint.is_dir()
    findings = []
    try:
        for one in chosen:
            say(f"building and measuring {one} {SHAPE}")
            found = _measure(one, replace(job, module=one.module, precision=one.precision), measure_limits)
            say(f"  not measured: {found.reason}" if found.reason else f"  built in {found.record['build_s']:.0f} s")
            findings.append(found)
    finally:
        if not had_checkpoint:
            shutil.rmtree(job.checkpoint, ignore_errors=True)
    return findings


def _measure(one: Contestant, job: Job, measure_limits: Callable[[], dict[str, float]]) -> Finding:
    name = f"{one} {job.shape_name}"
    if reason := what_is_short(job, free_bytes=_free_bytes(job.folder), memory_bytes=available_memory_bytes()):
        return Finding(name, reason=reason)
    try:
        make_checkpoint(job.checkpoint, job.shape)
        record, reason = _run(job)
        if reason:
            return Finding(name, reason=reason)
        limits = Limits(**measure_limits())
        cell_bounds = bounds(
            DECODE,
            one,
            job.shape,
            limits,
            weight_bytes=record["weight_bytes"],
            kv_bytes_per_token=record["kv_bytes_per_token"],
        )
        return Finding(name, record | {"fraction": record["tokens_per_s"] / cell_bounds.nearer})
    finally:
        shutil.rmtree(ours.engine_directory(job), ignore_errors=True)


def what_is_short(job: Job, *, free_bytes: int, memory_bytes: int) -> str:
    """Returns why this cannot be built and opened here, or an empty string."""
    num_others = job.shape.num_parameters - job.shape.head_products
    engine_bytes = WEIGHTS[job.precision].num_bytes(num_others) + 2 * job.shape.head_products
    checkpoint_bytes = 0 if job.checkpoint.is_dir() else 2 * job.shape.num_parameters
    short = [
        f"it needs {needed / GB:.0f} GB of {what} and has {there / GB:.0f}"
        for what, needed, there in (
            ("disk", engine_bytes + checkpoint_bytes + SPARE_BYTES, free_bytes),
            ("memory", engine_bytes + SPARE_BYTES, memory_bytes),
        )
        if there < needed
    ]
    return "; ".join(short)


def _free_bytes(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    return shutil.disk_usage(folder).free


def _run(job: Job) -> tuple[dict[str, Any], str]:
    """Returns the process's report, and why it failed, if it did."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "tools.benchmark.large", job.to_json(), str(report)]
        root = Path(__file__).resolve().parents[2]
        try:
            done = subprocess.run(
                command, cwd=root, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return {}, f"it took longer than {TIMEOUT_S} s"
        if done.returncode:
            return {}, last_lines(done.stderr)
        record: dict[str, Any] = json.loads(report.read_text())
        return record, ""


def large_section(findings: Sequence[Finding]) -> str:
    """A section of the page: builds, and the engines that they made."""
    lines = [
        [
            found.name,
            f"{record['build_s']:.0f}",
            ", ".join(f"{name} {seconds:.0f}" for name, seconds in record["phases_s"].items()),
            f"{record['build_peak_bytes'] / GB:.2f}",
            f"{record['file_bytes'] / GB:.1f}",
            f"{record['open_s']:.2f}",
            f"{record['tokens_per_s']:.2f}",
            f"{record['fraction']:.2f}",
        ]
        for found in findings
        if (record := found.record)
    ]
    head = ["", "built in, s", "phases, s", "memory of the build, GB", "file, GB", "opened in, s", "batch 1, tokens/s",
            "of the limit"]  # fmt: skip
    skipped = [f"* {found.name}: {found.reason}" for found in findings if found.reason]
    return "\n\n".join(["## A large network", *([table(head, lines)] if lines else []), "\n".join(skipped)]).rstrip()


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(build_and_measure(Job.from_json(sys.argv[1]))))
