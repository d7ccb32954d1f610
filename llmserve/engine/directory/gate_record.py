"""Release gate records of an engine, which belong to its digest, and whether they allow it to serve.

`gate.jsonl` in the engine directory is a `sealed_log`: `llmserve eval` adds a line for every run, with any verdict. A
record is for the engine with its digest, so an engine that computes anything else needs its own records. An adapter has
records in its own directory, which count for the digests of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.registry import runtime_for
from llmserve.errors import GateClosed, InvalidArgument, raise_problems
from llmserve.sealed_log import Line, Verifier, read

RECORDS_FILE = "gate.jsonl"
ANY_SUITE = "any"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class GateRecord:
    """One run of a suite."""

    line: Line

    @property
    def engine_digest(self) -> str:
        return str(self.line.content["engine"]["digest"])

    @property
    def adapter_digest(self) -> str:
        """Empty: the engine answered without an adapter."""
        return str(self.line.content["engine"].get("adapter_digest", ""))

    @property
    def kernels(self) -> str:
        """The kernels that computed; with others, the engine may round differently. See `EngineInfo.kernels`."""
        return str(self.line.content["engine"]["kernels"])

    @property
    def suite(self) -> str:
        return str(self.line.content["suite"]["name"])

    @property
    def is_complete(self) -> bool:
        """Whether every sample of the suite was answered."""
        return bool(self.line.content["suite"]["complete"])

    @property
    def blessed_by(self) -> str:
        """The person who approved the margins; empty: not approved."""
        return str(self.line.content["suite"]["blessed_by"])

    @property
    def passed(self) -> bool:
        return bool(self.line.content["passed"])

    @property
    def verdict(self) -> str:
        return str(self.line.content["verdict"])

    @property
    def time(self) -> str:
        return str(self.line.content["time"])

    @property
    def speed(self) -> Mapping[str, Any] | None:
        """Machine and values; None if the run measured none, as in the first versions."""
        found: Mapping[str, Any] | None = self.line.content.get("speed")
        return found

    def __str__(self) -> str:
        part = "" if self.is_complete else f", {self.line.content['suite']['num_samples']} samples only"
        blessed = "" if self.blessed_by else ", of a suite that is not blessed"
        signed = f", signed with {self.line.key}" if self.line.key else ""
        kernels = f", {self.kernels}" if self.kernels else ""
        return (
            f"{self.suite}: {'passed' if self.passed else self.verdict}{part}{blessed} ({self.time}{kernels}{signed})"
        )


@dataclass(frozen=True, slots=True)
class GateRule:
    """The records that an engine must have before it serves."""

    suites: tuple[str, ...] = ()  # suites that must have passed; empty: any suite, and no other may have failed
    verifier: Verifier | None = None  # only records signed with these keys count


@dataclass(frozen=True, slots=True)
class GateSubject:
    """The subject of records in a directory: an engine, or an adapter with its engine."""

    path: Path
    engine_digest: str
    kernels: str  # kernels in use
    adapter_digest: str = ""

    @classmethod
    def engine(cls, directory: EngineDirectory) -> GateSubject:
        manifest = directory.manifest
        return cls(directory.path, manifest.engine_digest, runtime_for(manifest.target).kernels())

    @property
    def name(self) -> str:
        return "adapter" if self.adapter_digest else "engine"

    def command(self, suite: str) -> str:
        given = f"ENGINE --adapter {self.path} --lora ADAPTER" if self.adapter_digest else str(self.path)
        return f"make one with: llmserve eval {given} --hf-model-dir CHECKPOINT --suite {suite}"


def records_in(path: Path, engine_digest: str, adapter_digest: str = "") -> list[GateRecord]:
    """Records of this engine, or of an adapter with it, oldest first. `InvalidArgument` if the file was changed."""
    wanted = (engine_digest, adapter_digest)
    return [record for record in every_record(path) if (record.engine_digest, record.adapter_digest) == wanted]


def every_record(path: Path) -> list[GateRecord]:
    """Records of all engines that were in the directory, oldest first. `InvalidArgument` if the file was changed."""
    file = path / RECORDS_FILE
    found = [GateRecord(line) for line in read(file)]
    try:
        return [record for record in found if record.engine_digest and _is_whole(record)]
    except (KeyError, TypeError) as error:
        raise InvalidArgument(
            f"{file} has a record that lacks a field ({error!r}), like records of older versions; remove the file, and "
            "run the suites again"
        ) from error


def records_of(directory: EngineDirectory) -> list[GateRecord]:
    """See `records_in`."""
    return records_in(directory.path, directory.manifest.engine_digest)


def latest(records: Sequence[GateRecord]) -> Mapping[str, GateRecord]:
    """The last complete record of each suite: an earlier pass does not outweigh a later failure."""
    return {record.suite: record for record in records if record.is_complete}


def require_gate(directory: EngineDirectory, rule: GateRule) -> None:
    """Like `require_record`, for the engine's actual bytes: hashes every file."""
    require_record(GateSubject.engine(directory), rule)
    directory.verify()


def require_record(subject: GateSubject, rule: GateRule) -> None:
    """`GateClosed` unless the records satisfy `rule`; lists every reason."""
    raise_problems(GateClosed, f"the gate refuses {subject.path}", gate_problems(subject, rule))


def gate_problems(subject: GateSubject, rule: GateRule) -> list[str]:
    """Why the records do not allow it to serve here; empty if they do."""
    try:
        records = records_in(subject.path, subject.engine_digest, subject.adapter_digest)
    except InvalidArgument as error:
        return [str(error)]
    found = latest([record for record in records if record.kernels == subject.kernels])
    elsewhere = latest([record for record in records if record.kernels != subject.kernels])
    wanted = rule.suites or tuple(found or elsewhere)
    if not wanted:
        digest = (subject.adapter_digest or subject.engine_digest)[:12]
        return [f"no suite has a record for this {subject.name} (digest {digest}); {subject.command('SUITE.yaml')}"]
    return [
        problem
        for suite in wanted
        if (
            problem := _of_elsewhere(subject, elsewhere[suite])
            if suite in elsewhere and suite not in found
            else _problem(subject, rule, suite, found.get(suite))
        )
    ]


def _of_elsewhere(subject: GateSubject, record: GateRecord) -> str:
    return (
        f"suite {record.suite} was run with {record.kernels}, but this machine uses {subject.kernels}, which "
        f"may round differently; {subject.command(f'{record.suite}.yaml')}"
    )


def _problem(subject: GateSubject, rule: GateRule, suite: str, record: GateRecord | None) -> str:
    if record is None:
        return f"suite {suite} has no complete record for its digest; {subject.command(f'{suite}.yaml')}"
    if not record.passed:
        return f"suite {suite} says {record.verdict} ({record.time})"
    if not record.blessed_by:
        return f"suite {suite} was passed, but nobody has blessed it; run llmserve eval bless, and then the suite again"
    if rule.verifier and (problem := rule.verifier.problem(record.line)):
        return f"suite {suite}: {problem}"
    return ""


def _is_whole(record: GateRecord) -> bool:
    """Reads every field once, so that a missing one is noticed here."""
    return bool(str(record))


def standing(path: Path, engine_digest: str, adapter_digest: str = "") -> tuple[GateRecord, ...]:
    """A summary for display: the last complete record of each suite, by name; empty if the file was changed."""
    try:
        found = latest(records_in(path, engine_digest, adapter_digest))
    except InvalidArgument:
        return ()
    return tuple(found[suite] for suite in sorted(found))
