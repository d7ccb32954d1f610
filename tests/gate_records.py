"""Lines of `gate.jsonl` beside an engine, as an evaluation would leave them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmserve import sealed_log
from llmserve.engine.directory.gate_record import RECORDS_FILE, GateRecord
from llmserve.engine.registry import runtime_for
from llmserve.sealed_log import Line, Signer

HERE = runtime_for("cpu").kernels()


def content_of(
    digest: str, suite: str = "docs", *, passed: bool = True, kernels: str = HERE, adapter: str = "", **facts: Any
) -> dict[str, Any]:
    """`adapter`: digest of the one that answered with the engine."""
    return {
        "engine": {"digest": digest, "kernels": kernels} | ({"adapter_digest": adapter} if adapter else {}),
        "suite": {"name": suite, "complete": True, "num_samples": 50, "blessed_by": "ann"} | facts,
        "passed": passed,
        "verdict": "pass" if passed else "fail",
        "time": "2026-01-02T03:04:05Z",
    }


def record_of(suite: str, *, passed: bool) -> GateRecord:
    """In no file."""
    return GateRecord(Line(content_of("d", suite, passed=passed), "seal"))


def add_gate_record(
    folder: Path, digest: str, suite: str = "docs", *, signer: Signer | None = None, passed: bool = True, **facts: Any
) -> None:
    sealed_log.append(folder / RECORDS_FILE, content_of(digest, suite, passed=passed, **facts), signer)
