"""Measures column after column: the reference once, then every contestant in its own process.

Peers' losses are kept with their files and not measured again on the same texts, because only ours change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.benchmark.process import run_module
from tools.quality.columns import Column
from tools.quality.contestants import REFERENCE, Contestant
from tools.quality.job import QualityJob
from tools.quality.losses import Losses
from tools.quality.networks import Networks, NoNetwork

WORKER = "tools.quality.worker"
ENGINES = "tools.quality.engines"
TIMEOUT_S = 1800


@dataclass(slots=True)
class Findings:
    losses: dict[tuple[str, str], Losses] = field(default_factory=dict)  # (contestant, column)
    failures: dict[tuple[str, str], str] = field(default_factory=dict)  # the same keys -> reason
    no_columns: dict[str, str] = field(default_factory=dict)  # title -> why it could not be measured


@dataclass(frozen=True, slots=True)
class Measurement:
    networks: Networks
    python: Path  # of the peers' environment
    missing: Mapping[str, str]  # its modules that could not be installed -> reason
    threads: int
    say: Callable[[str], None]

    def run(self, columns: Sequence[Column], contestants: Sequence[Contestant]) -> Findings:
        findings = Findings()
        for column in columns if contestants else ():
            try:
                folder = self.networks.prepare(column)
                self._column(column, folder, contestants, findings)
            except NoNetwork as error:
                self.say(f"{column.title}: {error}")
                findings.no_columns[column.title] = str(error)
        return findings

    def _column(self, column: Column, folder: Path, contestants: Sequence[Contestant], findings: Findings) -> None:
        reference = self._job(REFERENCE, folder, column)
        self.say(f"{column.title}: {REFERENCE.name}")
        try:
            if reason := self._run("reference", REFERENCE, reference):
                raise NoNetwork(f"{REFERENCE.name} failed: {reason}")
            for one in contestants:
                self.say(f"{column.title}: {one.name}")
                found = self._measure(one, self._job(one, folder, column))
                if isinstance(found, Losses):
                    self.say(f"  mean KL {found.mean:.5f}, {found.bits_per_weight:.2f} bits")
                    findings.losses[one.name, column.name] = found
                else:
                    self.say(f"  failed: {found}")
                    findings.failures[one.name, column.name] = found
        finally:
            reference.reference.unlink(missing_ok=True)  # gigabytes

    def _measure(self, one: Contestant, job: QualityJob) -> Losses | str:
        """Returns the losses, or why there are none."""
        path = job.losses
        if one.is_ours or not path.is_file():
            path.unlink(missing_ok=True)
            if reason := self._run("prepare", one, job) or self._run("measure", one, job):
                return reason
        return Losses.load(path)

    def _job(self, one: Contestant, folder: Path, column: Column) -> QualityJob:
        return QualityJob(f"{ENGINES}.{one.module}", one.precision, folder, column.name, self.threads)

    def _run(self, command: str, one: Contestant, job: QualityJob) -> str:
        """Returns why it failed, or an empty string."""
        if reason := self.missing.get(one.requirement, ""):
            return reason
        python = Path(sys.executable) if one.is_ours else self.python
        arguments = [WORKER, command, job.to_json()]
        return run_module(python, arguments, threads=self.threads, timeout_s=TIMEOUT_S)
