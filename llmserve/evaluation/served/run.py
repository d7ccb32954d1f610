"""The subject of an evaluation, and the part that checks it as it is served."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmserve.client import Access
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.gate_record import GateRecord, every_record
from llmserve.engine.directory.identity import EngineIdentity, told_apart
from llmserve.errors import InvalidArgument
from llmserve.evaluation.reporting.report import Report
from llmserve.evaluation.served.check import (
    NUM_SAMPLES,
    Asked,
    Served,
    Watcher,
    check_engine,
    check_server,
    require_engine,
    server_identity,
)
from llmserve.evaluation.served.judging import served_part
from llmserve.evaluation.suite import Suite


@dataclass(frozen=True, slots=True)
class ServedOptions:
    command: tuple[str, ...] = ()  # starts a server that ends with this process; not needed for a running server
    num_samples: int = NUM_SAMPLES
    http_url: str = ""  # of the running server
    previous: Path | None = None  # engine directory with the record to compare speed with; None: the engine's own
    threads: int = 0  # for the engine; 0: every core

    def rules(self, *, url: str) -> list[tuple[bool, str]]:
        return [
            (self.num_samples >= 1, "--served-samples must be at least 1"),
            (bool(url) or not self.http_url, "--http-url needs --url of the same running server"),
        ]


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine directory, or a running server with its description of the engine."""

    directory: EngineDirectory | None
    url: str
    access: Access
    identity: EngineIdentity | None  # None: the server does not report it
    adapter: Path | None = None  # directory of the adapter that answers with the engine

    @classmethod
    def of(cls, directory: EngineDirectory | None, url: str, access: Access, adapter: Path | None = None) -> Subject:
        """`InvalidArgument` if the server has another engine than the directory."""
        if not url:
            assert directory is not None, "checked with the options"
            return cls(directory, url, access, EngineIdentity.of(directory.manifest), adapter)
        asking = server_identity(url, access) if directory is None else require_engine(url, access, directory)
        return cls(directory, url, access, asyncio.run(asking))

    def require_unchanged(self) -> None:
        """`InvalidArgument` if the engine has changed: the answers would belong to neither."""
        now = self._identity_now()
        if now != self.identity:
            place = self.url or str(self.directory.path if self.directory else "")
            told = told_apart(*(one.digest if one else "unknown" for one in (self.identity, now)))
            raise InvalidArgument(
                f"the engine of {place} changed during the run (digest {told[0]}, now {told[1]}): its answers belong "
                "to neither; run the evaluation again"
            )

    def _identity_now(self) -> EngineIdentity | None:
        if self.url:
            return asyncio.run(server_identity(self.url, self.access)) or self.identity
        assert self.directory is not None, "checked with the options"
        return EngineIdentity.of(EngineDirectory.open(self.directory.path).manifest)


def with_served(
    report: Report, suite: Suite, subject: Subject, options: ServedOptions | None, asked: Asked, watcher: Watcher
) -> Report:
    """Check the engine as it is served, and judge that, too."""
    served = None if options is None else _served(suite, subject, options, asked, watcher)
    subject.require_unchanged()
    part = served_part(suite, served, _records(subject, options))
    if part is None:
        return report
    gate = replace(report.gate, others=(*report.gate.others, *part.judged))
    return replace(report, gate=gate, served=part, passed=gate.passes(inconclusive=suite.inconclusive_passes))


def _served(suite: Suite, subject: Subject, options: ServedOptions, asked: Asked, watcher: Watcher) -> Served:
    promises = subject.identity is not None and subject.identity.is_deterministic
    some, is_judged = asked.spread(options.num_samples), suite.needs_served or promises
    if subject.url:
        asking = check_server(subject.url, options.http_url, subject.access, some, watcher, is_judged=is_judged)
    else:
        assert subject.directory is not None
        asking = check_engine(
            subject.directory,
            options.command,
            some,
            watcher,
            threads=options.threads,
            is_judged=is_judged,
            adapter=subject.adapter,
        )
    served = asyncio.run(asking)
    if is_judged:
        return served
    why = "the engine does not promise the same bits in every batch, and the suite has no `as_served: required`"
    return replace(served, notes=(*served.notes, f"as served: reported, not judged; {why}"))


def _records(subject: Subject, options: ServedOptions | None) -> Sequence[GateRecord]:
    """Records to compare speed with; empty if the file was changed, which is reported when a record is added."""
    place = subject.directory.path if subject.directory is not None and not subject.url else None
    place = subject.adapter or place
    if options is not None and options.previous is not None:
        return every_record(options.previous)
    try:
        return [] if place is None else every_record(place)
    except InvalidArgument:
        return []
