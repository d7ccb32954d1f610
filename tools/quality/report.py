"""Losses as a JSON file and a Markdown page."""

from __future__ import annotations

from collections import Counter
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
        f"Mean Kullback-Leibler divergence of the next token's distribution from {REFERENCE.name}, in nats; in "
        "brackets the positions with the same best token, and bits per weight. All engines have the same weights and "
        "token ids, teacher-forced. Nothing was tuned on networks with an asterisk. The JSON file with this page has "
        "percentiles and intervals.",
    ]
    if measured:
        parts.append(_summary(measured, contestants, findings))
        found = [pair for column in measured for pair in comparisons(contestants, column, findings)]
        parts += ["## Comparisons", f"Networks by the {CONFIDENCE:.0%} interval of the difference.", _verdicts(found)]
    if problems := _problems(columns, findings):
        parts += ["## Not measured", "\n".join(problems)]
    return "\n\n".join(parts) + "\n"


def _summary(columns: Sequence[Column], contestants: Sequence[Contestant], findings: Findings) -> str:
    def cell(found: Losses | None) -> str:
        return "-" if found is None else f"{short(found.mean)} ({found.agreement:.1%}; {found.bits_per_weight:.1f})"

    def size(column: Column) -> str:
        found = (findings.losses.get((one.name, column.name)) for one in contestants)
        return next((f"{len(each.lengths)} ({len(each.divergence):,})" for each in found if each is not None), "-")

    head = [f"{column.title}{' *' if column.held_out else ''}" for column in columns]
    lines = [
        [one.name, *(cell(findings.losses.get((one.name, column.name))) for column in columns)] for one in contestants
    ]
    return table(["engine", *head], [["texts (positions)", *map(size, columns)], *lines])


def _verdicts(found: Sequence[tuple[str, str, Comparison]]) -> str:
    pairs = list(dict.fromkeys((ours, theirs) for ours, theirs, _ in found))
    verdicts = Counter((ours, theirs, one.verdict) for ours, theirs, one in found)
    kinds = ("better", "undecided", "worse")
    lines = [[*pair, *(str(verdicts[*pair, kind]) for kind in kinds)] for pair in pairs]
    return table(["llmserve", "compared with", *kinds], lines)


def _problems(columns: Sequence[Column], findings: Findings) -> list[str]:
    titles = {column.name: column.title for column in columns}
    failed = [f"* {one}, {titles[column]}: {reason}" for (one, column), reason in findings.failures.items()]
    return [*failed, *(f"* {title}: {reason}" for title, reason in findings.no_columns.items())]


def short(value: float) -> str:
    """Two digits that count, but no more than five behind the point."""
    return f"{value:.3f}" if value >= 0.1 else f"{value:.4f}" if value >= 0.001 else f"{value:.5f}"
