"""Losses as a JSON file and a Markdown page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tools.benchmark.markdown import table
from tools.quality.columns import Column
from tools.quality.contestants import REFERENCE, Contestant
from tools.quality.losses import CONFIDENCE, Comparison, Losses, compare
from tools.quality.measuring import Findings


def comparisons(
    contestants: Sequence[Contestant], column: Column, findings: Findings
) -> Iterator[tuple[str, str, Comparison]]:
    """(ours, theirs, comparison) for every pair that was measured."""
    for ours in contestants:
        for rival in ours.rivals:
            pair = [findings.losses.get((name, column.name)) for name in (ours.name, rival)]
            if pair[0] is not None and pair[1] is not None:
                yield ours.name, rival, compare(pair[0], pair[1])


def json_report(
    machine: str, columns: Sequence[Column], contestants: Sequence[Contestant], findings: Findings
) -> dict[str, Any]:
    return {
        "machine": machine,
        "reference": REFERENCE.name,
        "rows": [
            {"contestant": one.name, "column": column.name, **findings.losses[one.name, column.name].numbers()}
            for column in columns
            for one in contestants
            if (one.name, column.name) in findings.losses
        ],
        "comparisons": [
            {"column": column.name, "ours": ours, "theirs": theirs, **found.numbers()}
            for column in columns
            for ours, theirs, found in comparisons(contestants, column, findings)
        ],
        "failures": [
            {"contestant": one, "column": column, "reason": reason}
            for (one, column), reason in findings.failures.items()
        ],
        "not_measured": findings.no_columns,
    }  # fmt: skip


def markdown_report(
    machine: str, columns: Sequence[Column], contestants: Sequence[Contestant], findings: Findings
) -> str:
    measured = [column for column in columns if column.title not in findings.no_columns]
    parts = [
        "# What rounding costs",
        machine,
        f"Mean Kullback-Leibler divergence of the next token's distribution from {REFERENCE.name}, in nats, and the "
        "positions where both have the same best token. Everyone has the same weights and token ids, teacher-forced. "
        "Columns with an asterisk are networks that nothing was tuned on.",
    ]
    if measured:
        parts.append(_summary(measured, contestants, findings))
    for column in measured:
        parts += [
            f"## {column.title}",
            _describe(column, contestants, findings),
            _details(column, contestants, findings),
        ]
        if found := list(comparisons(contestants, column, findings)):
            parts.append(_verdicts(found))
    if problems := _problems(columns, findings):
        parts += ["## Not measured", "\n".join(problems)]
    return "\n\n".join(parts) + "\n"


def _summary(columns: Sequence[Column], contestants: Sequence[Contestant], findings: Findings) -> str:
    def cell(found: Losses | None) -> str:
        return "-" if found is None else f"{short(found.mean)} ({found.agreement:.1%}; {found.bits_per_weight:.1f})"

    head = [f"{column.title}{' *' if column.held_out else ''}" for column in columns]
    lines = [
        [one.name, *(cell(findings.losses.get((one.name, column.name))) for column in columns)] for one in contestants
    ]
    return table(["mean KL (top-1 agreement; bits per weight)", *head], lines)


def _describe(column: Column, contestants: Sequence[Contestant], findings: Findings) -> str:
    found = [
        findings.losses[one.name, column.name] for one in contestants if (one.name, column.name) in findings.losses
    ]
    if not found:
        return "Nobody could be measured."
    return f"{len(found[0].divergence):,} positions of {len(found[0].lengths)} texts."


def _details(column: Column, contestants: Sequence[Contestant], findings: Findings) -> str:
    lines = []
    for one in contestants:
        found = findings.losses.get((one.name, column.name))
        numbers = ["-"] * 4 if found is None else [
            short(found.mean), short(found.p99), f"{found.agreement:.2%}", f"{found.bits_per_weight:.2f}"
        ]  # fmt: skip
        lines.append([one.name, *numbers])
    return table(["", "mean KL", "99th percentile", "same best token", "bits per weight"], lines)


def _verdicts(found: Sequence[tuple[str, str, Comparison]]) -> str:
    lines = [
        [ours, theirs, f"{one.difference:+.2g}", f"{one.low:+.2g} to {one.high:+.2g}", f"{ours} is {one.verdict}"
         if one.verdict != "undecided" else "undecided"]
        for ours, theirs, one in found
    ]  # fmt: skip
    return table(["ours", "theirs", "ours minus theirs", f"{CONFIDENCE:.0%} interval", "verdict"], lines)


def _problems(columns: Sequence[Column], findings: Findings) -> list[str]:
    titles = {column.name: column.title for column in columns}
    failed = [f"* {one}, {titles[column]}: {reason}" for (one, column), reason in findings.failures.items()]
    return [*failed, *(f"* {title}: {reason}" for title, reason in findings.no_columns.items())]


def short(value: float) -> str:
    """Two digits that count, but no more than five behind the point."""
    return f"{value:.3f}" if value >= 0.1 else f"{value:.4f}" if value >= 0.001 else f"{value:.5f}"
