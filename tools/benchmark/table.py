"""Findings as rows: rates, how near they come to the limits, and ratios to the best peer at equal precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tools.benchmark.bounds import Bounds, Limits, bounds
from tools.benchmark.contestants import Contestant
from tools.benchmark.rounds import Entry, Findings
from tools.benchmark.statistics import Spread


@dataclass(frozen=True, slots=True)
class Row:
    shape: str
    contestant: Contestant
    cell: str
    rate: Spread  # tokens per second
    bounds: Bounds

    @property
    def fraction(self) -> float:
        """Of the nearer limit."""
        return self.rate.median / self.bounds.nearer


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ours over the best peer with as many bits per weight."""

    shape: str
    contestant: Contestant
    cell: str
    best_peer: Contestant
    value: float


def median_limits(findings: Findings) -> Limits:
    """The medians of what was measured between the entries."""
    measured = findings.limits
    return Limits(
        *(median(limits[name] for limits in measured) for name in ("read_bytes", "products", "products_int8"))
    )


def rows_of(entries: Sequence[Entry], findings: Findings) -> list[Row]:
    """One per entry and cell that was measured."""
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
                rows.append(Row(entry.job.shape_name, entry.contestant, cell.name, Spread.of(rates), limit))
    return rows


def ratios_of(rows: Sequence[Row]) -> list[Ratio]:
    """For each of our rows that a peer's can be compared with."""
    found = []
    for ours in rows:
        peers = [
            row
            for row in rows
            if not row.contestant.is_ours
            and (row.shape, row.cell, row.contestant.bits) == (ours.shape, ours.cell, ours.contestant.bits)
        ]
        if ours.contestant.is_ours and peers:
            best = max(peers, key=lambda row: row.rate.median)
            value = ours.rate.median / best.rate.median
            found.append(Ratio(ours.shape, ours.contestant, ours.cell, best.contestant, value))
    return found
