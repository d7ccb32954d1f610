"""What the gate makes of an engine as it is served, and what report and record keep."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from llmserve.evaluation.judging.gate import GateResult, Verdict, judge
from llmserve.evaluation.reporting.html_report import render_html
from llmserve.evaluation.served.check import Asked, Served
from llmserve.evaluation.served.comparison import Difference, ServedResult
from llmserve.evaluation.served.judging import served_facts, served_part
from llmserve.evaluation.served.run import ServedOptions
from llmserve.evaluation.served.speed import Speed
from llmserve.evaluation.served.table import served_notes, served_tables
from llmserve.evaluation.suite import Suite, load_suite
from tests.evaluation.served.test_speed import record
from tests.evaluation.suites import write_suite
from tests.evaluation.test_report import GOOD as ANSWERS
from tests.evaluation.test_report import report

SPEED = Speed("EPYC, 2 cores", 32, {"ttft": 0.02, "throughput": 800.0})
GOOD = ServedResult("in flight", 32, notes=("up to 32 at the same time",))
BAD = replace(GOOD, differences=(Difference("row-3", "token ids", 5, "17", "4"),))


def suite(folder: Path, **changes: object) -> Suite:
    return load_suite(write_suite(folder, name="docs", **changes))


def gate_of(part: object) -> GateResult:
    scores = {"rougeL": np.full(32, 50.0)}
    metrics = judge(scores, scores, margins={}, floors={"rougeL": 20.0}).metrics
    return GateResult(metrics, (), part.judged)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (GOOD, Verdict.PASS),
        (BAD, Verdict.FAIL),
        (replace(BAD, is_judged=False), Verdict.PASS),
        (ServedResult("preempted", 32, doubt="nothing"), Verdict.INCONCLUSIVE),
    ],
)
def test_one_difference_fails_the_gate(result: ServedResult, verdict: Verdict, tmp_path: Path) -> None:
    part = served_part(suite(tmp_path), Served((GOOD, result), ()), [])
    assert part is not None
    gate = gate_of(part)
    assert gate.verdict is verdict
    if verdict is Verdict.FAIL:
        assert gate.reasons == ["as served, in flight: 1 of 32 differ: row-3 (token ids, position 5: 4 instead of 17)"]


def test_a_suite_that_asks_for_it_is_inconclusive_without(tmp_path: Path) -> None:
    assert served_part(suite(tmp_path), None, []) is None
    part = served_part(suite(tmp_path, as_served="required"), None, [])
    assert part is not None
    assert gate_of(part).verdict is Verdict.INCONCLUSIVE
    assert "--no-as-served" in gate_of(part).reasons[0]


def test_a_slower_engine_fails_where_the_suite_says_so(tmp_path: Path) -> None:
    last = replace(SPEED, values={"ttft": 0.01, "throughput": 1000.0})
    served = Served((GOOD,), ("a note",), SPEED)
    part = served_part(suite(tmp_path, speed_margins={"ttft": 1.5}), served, [record(last)])
    assert part is not None
    assert gate_of(part).verdict is Verdict.FAIL
    assert "first token 20 ms is 2.00 times as bad as the last 10 ms, not 1.5" in gate_of(part).reasons[0]
    assert part.documents()["speed"] == SPEED.document() | {"times_worse": {"ttft": 2.0, "throughput": 1.25}}
    assert served_facts(part)["speed"] == SPEED.document()
    assert served_facts(part)["served"]["in flight"]["verdict"] == "pass"

    without = served_part(suite(tmp_path / "other"), served, [record(last)])
    assert without is not None
    assert gate_of(without).verdict is Verdict.PASS

    output = StringIO()
    console = Console(width=120, file=output)
    for table in served_tables(part):
        console.print(table)
    text = output.getvalue()
    for words in ("in flight", "up to 32 at the same time", "first token", "20 ms", "2.00", "fail"):
        assert words in text
    assert served_notes(part)[0] == "a note"


def test_the_page_shows_conditions_what_differs_and_speed(tmp_path: Path) -> None:
    last = replace(SPEED, values={"ttft": 0.01, "throughput": 1000.0})
    asking = suite(tmp_path / "suite", speed_margins={"ttft": 1.5})
    part = served_part(asking, Served((GOOD, BAD), ("a note",), SPEED), [record(last)])
    page = render_html(replace(report(tmp_path, ANSWERS), served=part))
    for words in ("As it is served", "up to 32 at the same time", "row-3 (token ids, position 5", "2.00", "a note"):
        assert words in page
    assert "As it is served" not in render_html(report(tmp_path, ANSWERS))


def test_samples_are_spread_over_the_suite() -> None:
    numbers = [SimpleNamespace(id=str(number)) for number in range(500)]
    some = Asked(numbers, numbers, 8).spread(32)  # type: ignore[arg-type]
    assert [sample.id for sample in some.samples[:3]] == ["0", "15", "30"]
    assert len(some.samples) == len(some.answers) == 32
    assert len(Asked(numbers[:5], numbers[:5], 8).spread(32).samples) == 5  # type: ignore[arg-type]


def test_options() -> None:
    wrong = [text for holds, text in ServedOptions(num_samples=0, http_url="http://h").rules(url="") if not holds]
    assert wrong == [
        "--served-samples must be at least 1",
        "--http-url needs --url of the same running server",
    ]
