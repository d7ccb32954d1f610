"""Rows and ratios as Markdown tables, for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from tools.benchmark.statistics import Spread
from tools.benchmark.table import Ratio, Row

T = TypeVar("T")


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [list(head), ["---"] * len(head), *map(list, lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def rate_table(rows: Sequence[Row]) -> str:
    """Tokens per second as median (lowest-highest), and the loss if it was measured."""
    losses = {str(row.contestant): f"{row.losses.mean:.4f}" for row in rows if row.losses is not None}
    return _by_cell(rows, lambda row: row.rate.text(), {"mean KL, nats": losses} if losses else {})


def fraction_table(rows: Sequence[Row]) -> str:
    """The share of the nearer limit; `m` if that is memory, `x` if it is multiplication."""
    return _by_cell(
        rows, lambda row: f"{row.fraction:.2f} {'m' if row.bounds.reading <= row.bounds.multiplying else 'x'}"
    )


def ratio_table(ratios: Sequence[Ratio], title: str = "ours over the best peer") -> str:
    cells = _unique(ratio.cell for ratio in ratios)
    found = {(ratio.contestant, ratio.cell): ratio for ratio in ratios}
    lines = [
        [str(one), *(f"{r.value:.2f} ({r.best_peer})" if (r := found.get((one, cell))) else "" for cell in cells)]
        for one in _unique(ratio.contestant for ratio in ratios)
    ]
    return table([title, *cells], lines)


def limits_table(limits: Sequence[Mapping[str, float]]) -> str:
    names = (
        ("memory read, GB/s", "read_bytes"),
        ("float products, G/s", "products"),
        ("8-bit products, G/s", "products_int8"),
    )
    lines = [[text, Spread.of([one[key] for one in limits]).text(1e9, 1)] for text, key in names]
    return table(["limit", "median (lowest-highest)"], lines)


def _by_cell(
    rows: Sequence[Row], text: Callable[[Row], str], others: Mapping[str, Mapping[str, str]] | None = None
) -> str:
    """`others`: columns after the cells, by contestant; a cell is empty if a column lacks the contestant."""
    cells = _unique(row.cell for row in rows)
    found = {(row.contestant, row.cell): text(row) for row in rows}
    lines = [
        [
            str(one),
            *(found.get((one, cell), "-") for cell in cells),
            *(column.get(str(one), "") for column in (others or {}).values()),
        ]
        for one in _unique(row.contestant for row in rows)
    ]
    return table(["engine", *cells, *(others or {})], lines)


def _unique(values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))
