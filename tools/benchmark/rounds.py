"""Runs contestants in turn, round after round: each in its own process, one at a time. Measures limits in between."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tools.benchmark.cells import Cell
from tools.benchmark.contestants import Contestant
from tools.benchmark.job import Job
from tools.benchmark.process import run_module
from tools.quality.losses import Losses

WORKER = "tools.benchmark.worker"
TIMEOUTS_S = {"prepare": 1800, "measure": 2400, "serve": 1200}

Say = Callable[[str], None]
MeasureLimits = Callable[[], dict[str, float]]


@dataclass(frozen=True, slots=True)
class Entry:
    """A contestant with a network, and the interpreter of its environment."""

    contestant: Contestant
    job: Job
    python: Path

    def __str__(self) -> str:
        return f"{self.contestant} {self.job.shape_name}"


@dataclass(slots=True)
class Findings:
    """All measurements, and failures: (contestant and shape) -> reason."""

    samples: dict[tuple[str, str], list[dict[str, Any]]] = field(default_factory=dict)  # (entry, cell) -> records
    opened: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    peak_bytes: dict[str, list[int]] = field(default_factory=dict)
    serving: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)  # entry -> what -> numbers
    limits: list[dict[str, float]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    losses: dict[str, Losses] = field(default_factory=dict)  # contestant -> loss of a trained network by its rounding

    def add(self, entry: str, record: dict[str, Any]) -> None:
        if record["kind"] == "sample":
            self.samples.setdefault((entry, record["cell"]), []).append(record)
        elif record["kind"] == "opened":
            self.opened.setdefault(entry, []).append(record)
        elif record["kind"] == "serving":
            numbers = {key: value for key, value in record.items() if key not in ("kind", "what")}
            self.serving.setdefault(entry, {})[record["what"]] = numbers
        else:
            self.peak_bytes.setdefault(entry, []).append(record["peak_bytes"])

    def rates(self, entry: str, cell: Cell) -> list[float]:
        return [record["tokens"] / record["seconds"] for record in self.samples.get((entry, cell.name), [])]


def entries_for(
    contestants: Sequence[Contestant], shapes: Sequence[str], python: Callable[[Contestant], Path], job: Job
) -> list[Entry]:
    """Every contestant with every network, and the settings of `job` without prompts that take it too long."""
    cells = {one: tuple(cell for cell in job.cells if cell.prompt_tokens <= one.longest_prompt) for one in contestants}
    return [
        Entry(
            one,
            replace(job, module=one.module, precision=one.precision, shape_name=shape, cells=cells[one]),
            python(one),
        )
        for shape in shapes
        for one in contestants
    ]


def prepare(entries: Sequence[Entry], say: Say) -> Findings:
    """Makes the files that each entry opens. Entries that fail are left out of the rounds."""
    findings = Findings()
    for entry in sorted(entries, key=lambda entry: entry.contestant.is_ours):  # ours may read a peer's file
        say(f"preparing {entry}")
        _run("prepare", entry, findings, say)
    return findings


def run_rounds(
    entries: Sequence[Entry],
    findings: Findings,
    *,
    rounds: int,
    minutes: float,
    measure_limits: MeasureLimits,
    say: Say,
) -> None:
    """Runs up to `rounds` rounds. After the first, a round starts only if it should end within `minutes`."""
    began, longest = time.monotonic(), 0.0
    for number in range(rounds):
        elapsed = time.monotonic() - began
        if number and elapsed + longest > 60 * minutes:
            say(f"{number} rounds of {rounds}: another one would take longer than {minutes:g} minutes")
            break
        for entry in entries:
            if str(entry) not in findings.failures:
                findings.limits.append(measure_limits())
                say(f"round {number + 1}: {entry}")
                _run("measure", replace(entry, job=replace(entry.job, seed=1000 * number)), findings, say)
        longest = max(longest, time.monotonic() - began - elapsed)


def serve(entries: Sequence[Entry], findings: Findings, say: Say) -> None:
    """Measures the whole engine under load, once for each entry."""
    for entry in entries:
        if str(entry) not in findings.failures:
            say(f"serving: {entry}")
            _run("serve", entry, findings, say)


def _run(command: str, entry: Entry, findings: Findings, say: Say) -> None:
    if reason := run_worker(command, entry, findings):
        say(f"  failed: {reason}")
        findings.failures[str(entry)] = reason


def run_worker(command: str, entry: Entry, findings: Findings) -> str:
    """Adds the report to `findings`. Returns why it failed, or an empty string."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        reason = _execute(command, entry, report)
        for line in report.read_text().splitlines() if report.exists() else ():
            findings.add(str(entry), json.loads(line))
        return reason


def _execute(command: str, entry: Entry, report: Path) -> str:
    arguments = [WORKER, command, entry.job.to_json(), str(report)]
    return run_module(entry.python, arguments, threads=entry.job.threads, timeout_s=TIMEOUTS_S[command])
