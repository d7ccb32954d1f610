"""Records a gate run as a line next to the engine: the verdict, tied to the engine's digest."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from llmserve import sealed_log
from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.gate_record import FORMAT, RECORDS_FILE, GateRecord
from llmserve.engine.directory.identity import told_apart
from llmserve.errors import InvalidArgument
from llmserve.evaluation.judging.blessing import blessed_by, now
from llmserve.evaluation.reporting.report import Report, side_facts
from llmserve.evaluation.served.judging import served_facts

SEED = 0  # of all resampling


def add_record(
    engine: Path,
    suite: Path,
    report: Report,
    report_file: Path,
    *,
    signer: sealed_log.Signer | None = None,
    adapter: Path | None = None,
) -> GateRecord:
    """First hashes every file of the engine and of its adapter; with an adapter, that has the record. `EngineFileError`
    if a file was changed after the build, `InvalidArgument` if these files did not answer."""
    directory = EngineDirectory.open(engine)
    directory.verify()
    _require_same("engine", engine, report.engine.facts["engine_digest"], directory.manifest.engine_digest)
    if adapter is not None:
        sealed = SealedAdapter.open(adapter)
        sealed.verify()
        _require_same("adapter", adapter, report.engine.facts["adapter_digest"], sealed.digest)
    content = _content(report, hashlib.sha256(report_file.read_bytes()).hexdigest())
    content["suite"]["blessed_by"] = blessed_by(suite, report.rules)
    try:
        return GateRecord(sealed_log.append((adapter or directory.path) / RECORDS_FILE, content, signer))
    except InvalidArgument as error:
        raise InvalidArgument(f"{error}; use --no-record to omit the record") from error


def _require_same(what: str, path: Path, then: str, now_is: str) -> None:
    if then != now_is:
        told = told_apart(then, now_is)
        raise InvalidArgument(
            f"the {what} in {path} changed during the run (digest {told[0]}, now {told[1]}): its answers belong to "
            f"neither {what}; run the evaluation again"
        )


def _content(report: Report, report_sha256: str) -> dict[str, Any]:
    baseline = report.baseline.facts
    return {
        "format": FORMAT,
        "time": now(),
        "engine": {"digest": report.engine.facts["engine_digest"], **_but_digest(side_facts(report.engine))},
        "suite": report.suite_facts,
        "baseline": {
            name: baseline[name] for name in ("checkpoint_digest", "text_digest", "dtype") if name in baseline
        },
        "passed": report.passed,
        "verdict": report.gate.verdict.value,
        "reasons": report.gate.reasons,
        "metrics": report.metric_facts(),
        "losses": report.evidence_facts()["losses"],
        "exact_match_rate": report.parity.exact_match_rate,
        **served_facts(report.served),
        "seed": SEED,
        "versions": dict(report.versions),
        "report_sha256": report_sha256,
    }


def _but_digest(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name != "engine_digest"}
