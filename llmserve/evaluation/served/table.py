"""The engine as it is served, as tables: conditions, and speed compared with the last record."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from llmserve.evaluation.judging.gate import GroupedResult, Verdict
from llmserve.evaluation.served.comparison import ServedResult
from llmserve.evaluation.served.judging import ServedPart
from llmserve.evaluation.served.measures import MEASURES
from llmserve.evaluation.served.speed import SpeedResult

STYLES = {Verdict.PASS: "green", Verdict.INCONCLUSIVE: "yellow", Verdict.FAIL: "red"}


def served_tables(part: ServedPart | None) -> list[Table]:
    if part is None:
        return []
    conditions = _table("as served", "answers", "others", "")
    for result in part.results:
        conditions.add_row(*_condition_row(result))
    if part.comparison is None:
        return [conditions]
    speeds = _table("speed", "now", "last", "times worse", "at most")
    for row in speed_rows(part):
        speeds.add_row(*row)
    return [conditions, speeds]


def speed_rows(part: ServedPart | None) -> list[tuple[str | Text, ...]]:
    """Measure, now, last, times worse, at most, verdict."""
    return [_speed_row(result) for result in part.comparison.results] if part and part.comparison else []


def served_notes(part: ServedPart | None) -> list[str]:
    return [] if part is None else list(part.notes)


def _table(*headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column(headings[0], no_wrap=True)
    for heading in headings[1:]:
        table.add_column(heading, justify="right" if heading else "left", overflow="fold")
    table.add_column("verdict", justify="right", no_wrap=True)
    return table


def _condition_row(result: ServedResult) -> tuple[str | Text, ...]:
    notes = "; ".join(result.notes)
    return result.name, f"{result.num_answers:,}", f"{len(result.differences):,}", notes, _verdict(result)


def _speed_row(result: SpeedResult) -> tuple[str | Text, ...]:
    measure = MEASURES[result.measure]

    def shown(value: float | None) -> str:
        return "" if value is None else f"{measure.scale * value:,.4g} {measure.unit}"

    ratio = "" if result.ratio is None else f"{result.ratio:.2f}"
    margin = "" if result.margin is None else f"{result.margin:g}"
    return measure.title, shown(result.value), shown(result.previous), ratio, margin, _verdict(result)


def _verdict(result: GroupedResult) -> Text:
    return Text(result.verdict.value, STYLES[result.verdict]) if result.is_judged else Text("")
