"""Findings as rows: rates, their share of the limits, and ratios to the best peer at equal precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from tools.benchmark.bounds import Bounds, Limits, bounds
from tools.benchmark.contestants import Contestant
from tools.benchmark.rounds import Entry, Findings
from tools.benchmark.statistics import Spread
from tools.quality.losses import Losses, compare


@dataclass(frozen=True, slots=True)
class Row:
    shape: str
    contestant: Contestant
    cell: str
    rate: Spread  # tokens per second
    bounds: Bounds
    losses: Losses | None = None  # of a trained network at this precision

    @property
    def fraction(self) -> float:
        """The share of the nearer limit."""
        return self.rate.median / self.bounds.nearer


@dataclass(frozen=True, slots=True)
class Ratio:
    """Our rate divided by a peer's."""

    shape: str
    contestant: Contestant
    cell: str
    best_peer: Contestant
    value: float


def median_limits(findings: Findings) -> Limits:
    """The medians of the limits measured between entries."""
    measured = findings.limits
    return Limits(
        *(median(limits[name] for limits in measured) for name in ("read_bytes", "products", "products_int8"))
    )


def rows_of(entries: Sequence[Entry], findings: Findings) -> list[Row]:
    """One row for each measured entry and cell."""
    if not findings.limits:
        return []
    limits = median_limits(findings)
    rows = []
    for entry in entries:
        for cell in entry.job.cells:
            if rates := findings.rates(str(entry), cell):
                opened = findings.opened[str(entry)][0]
                limit = bounds(
                    cell,
                    entry.contestant,
                    entry.job.shape,
                    limits,
                    weight_bytes=opened["weight_bytes"],
                    kv_bytes_per_token=opened["kv_bytes_per_token"],
                )
                losses = findings.losses.get(str(entry.contestant))
                rows.append(Row(entry.job.shape_name, entry.contestant, cell.name, Spread.of(rates), limit, losses))
    return rows


def ratios_of(rows: Sequence[Row]) -> list[Ratio]:
    """For each of our rows, the ratio to the best peer with as many bits per weight."""
    return _ratios(rows, lambda ours, theirs: theirs.contestant.bits == ours.contestant.bits)


def ratios_at_no_greater_loss(rows: Sequence[Row]) -> list[Ratio]:
    """For our rows with a measured loss: the ratio to the best peer whose loss is not significantly higher."""
    verdicts: dict[tuple[Contestant, Contestant], bool] = {}

    def counts(ours: Row, theirs: Row) -> bool:
        pair = ours.contestant, theirs.contestant
        if pair not in verdicts:
            verdicts[pair] = ours.losses is not None and _loses_no_more(theirs, ours.losses)
        return verdicts[pair]

    return _ratios(rows, counts)


def _loses_no_more(row: Row, ours: Losses) -> bool:
    if row.contestant.bits > 8:
        return True
    return row.losses is not None and compare(ours, row.losses).verdict != "better"


def _ratios(rows: Sequence[Row], counts: Callable[[Row, Row], bool]) -> list[Ratio]:
    """The ratio of each of our rows to the best peer for which `counts` is true."""
    found = []
    for ours in rows:
        if not ours.contestant.is_ours:
            continue
        others = [
            row for row in rows if not row.contestant.is_ours and (row.shape, row.cell) == (ours.shape, ours.cell)
        ]
        if peers := [row for row in others if counts(ours, row)]:
            best = max(peers, key=lambda row: row.rate.median)
            value = ours.rate.median / best.rate.median
            found.append(Ratio(ours.shape, ours.contestant, ours.cell, best.contestant, value))
    return found
