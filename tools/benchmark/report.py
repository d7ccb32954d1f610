"""Findings as a JSON file and a Markdown page, which name the host's class (cores, instruction set), not the host."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.benchmark.markdown import fraction_table, limits_table, rate_table, ratio_table, table
from tools.benchmark.rounds import Entry, Findings
from tools.benchmark.table import Ratio, Row, ratios_at_no_greater_loss, ratios_of, rows_of

MIB = 2**20


def json_report(machine: str, entries: Sequence[Entry], findings: Findings) -> dict[str, Any]:
    rows = rows_of(entries, findings)
    return {
        "machine": machine,
        "python": platform.python_version(),
        "limits": findings.limits,
        "versions": {name: records[0]["versions"] for name, records in findings.opened.items()},
        "rows": [_row(row) for row in rows],
        "ratios": [_ratio(ratio) for ratio in ratios_of(rows)],
        "ratios_at_no_greater_loss": [_ratio(ratio) for ratio in ratios_at_no_greater_loss(rows)],
        "losses": {name: found.numbers() for name, found in findings.losses.items()},
        "open_seconds": {name: [one["seconds"] for one in records] for name, records in findings.opened.items()},
        "peak_bytes": findings.peak_bytes,
        "serving": findings.serving,
        "ids": {f"{entry} / {cell}": records[0]["ids"] for (entry, cell), records in findings.samples.items()},
        "failures": findings.failures,
    }


def _row(row: Row) -> dict[str, Any]:
    one = row.contestant
    return {
        "shape": row.shape, "engine": one.engine, "precision": one.precision, "bits": one.bits, "cell": row.cell,
        "tokens_per_s": asdict(row.rate), "bounds": asdict(row.bounds), "fraction": row.fraction,
    }  # fmt: skip


def _ratio(ratio: Ratio) -> dict[str, Any]:
    return {
        "shape": ratio.shape, "ours": str(ratio.contestant), "cell": ratio.cell,
        "best_peer": str(ratio.best_peer), "ratio": ratio.value,
    }  # fmt: skip


def markdown_report(title: str, machine: str, entries: Sequence[Entry], findings: Findings) -> str:
    rows = rows_of(entries, findings)
    parts = [f"# {title}", machine]
    if findings.limits:
        parts.append(limits_table(findings.limits))
    for shape in dict.fromkeys(row.shape for row in rows):
        chosen = [row for row in rows if row.shape == shape]
        parts += [f"## {shape}: tokens/s", rate_table(chosen), "Fraction of the nearer limit (m: memory, x: "
                  "multiplication):", fraction_table(chosen)]  # fmt: skip
        if ratios := ratios_of(chosen):
            parts.append(ratio_table(ratios))
        if ratios := ratios_at_no_greater_loss(chosen):
            parts.append(ratio_table(ratios, "ours over the best peer that does not lose more"))
    if findings.peak_bytes:
        parts += ["## Opening and memory", _opening_table(findings)]
    if findings.serving:
        parts += ["## The whole engine", *_serving_parts(findings)]
    if findings.failures:
        parts += ["## Not measured", *(f"* {name}: {reason}" for name, reason in findings.failures.items())]
    return "\n\n".join(parts) + "\n"


def _opening_table(findings: Findings) -> str:
    lines = [
        [name, f"{min(one['seconds'] for one in findings.opened[name]):.2f}", f"{max(peaks) / MIB:,.0f}"]
        for name, peaks in findings.peak_bytes.items()
    ]
    return table(["engine", "opened in, s", "peak memory of the process, MiB"], lines)


def _serving_parts(findings: Findings) -> list[str]:
    parts = []
    for name, found in findings.serving.items():
        lines = [[what, key, number(value)] for what, numbers in found.items() for key, value in numbers.items()]
        parts += [f"### {name}", table(["", "", ""], lines)]
    return parts


def number(value: float) -> str:
    """At most three decimals, none for a whole number."""
    return f"{value:,.0f}" if value == round(value) else f"{value:,.3f}"


def write_reports(folder: Path, name: str, content: dict[str, Any], page: str) -> tuple[Path, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    json_path, page_path = folder / f"{name}.json", folder / f"{name}.md"
    partial_path = folder / f"{name}.json.partial"  # an interruption leaves the earlier report intact
    partial_path.write_text(json.dumps(content, indent=1) + "\n")
    partial_path.replace(json_path)
    page_path.write_text(page)
    return json_path, page_path
