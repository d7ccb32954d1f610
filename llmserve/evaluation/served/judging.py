"""What the gate judges of an engine as it is served, and what the report keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmserve.engine.directory.gate_record import GateRecord
from llmserve.evaluation.judging.gate import GroupedResult
from llmserve.evaluation.served.check import Served
from llmserve.evaluation.served.comparison import ServedResult
from llmserve.evaluation.served.speed import Comparison, Speed, compare_speed
from llmserve.evaluation.suite import Suite

NOT_ASKED = "the suite requires it, but it was skipped (--no-as-served)"


@dataclass(frozen=True, slots=True)
class ServedPart:
    """The part of a report on the engine as it is served."""

    results: tuple[ServedResult, ...]
    notes: tuple[str, ...]
    speed: Speed | None = None
    comparison: Comparison | None = None

    @property
    def judged(self) -> tuple[GroupedResult, ...]:
        speeds = self.comparison.results if self.comparison else ()
        return (*self.results, *speeds)

    def documents(self) -> dict[str, Any]:
        """For the report: conditions with every difference; values, compared with the last record."""
        conditions = {one.name: one.document() for one in self.results}
        served = {"conditions": conditions, "notes": list(self.notes)}
        if self.speed is None or self.comparison is None:
            return {"served": served}
        ratios = {one.measure: one.ratio for one in self.comparison.results if one.ratio is not None}
        return {"served": served, "speed": {**self.speed.document(), "times_worse": ratios}}

    def summary(self) -> dict[str, Any]:
        """For the record."""
        return {
            one.name: {
                "answers": one.num_answers, "differences": len(one.differences), "judged": one.is_judged,
                "verdict": one.verdict.value,
            }
            for one in self.results
        }  # fmt: skip


def served_part(suite: Suite, served: Served | None, records: Sequence[GateRecord]) -> ServedPart | None:
    """None if it was neither checked nor required."""
    if served is None:
        if not suite.needs_served:
            return None
        return ServedPart((ServedResult("all conditions", 0, doubt=NOT_ASKED),), ())
    if served.speed is None:
        return ServedPart(served.results, served.notes)
    comparison = compare_speed(served.speed, records, suite.name, suite.speed_margins)
    return ServedPart(served.results, (*served.notes, comparison.note), served.speed, comparison)


def served_facts(part: ServedPart | None) -> Mapping[str, Any]:
    """What the record keeps; empty if nothing was checked."""
    if part is None:
        return {}
    speed = part.speed.document() if part.speed is not None else None
    return {"served": part.summary(), **({"speed": speed} if speed is not None else {})}
