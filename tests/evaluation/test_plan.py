from __future__ import annotations

import json
import math
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from llmserve.errors import InvalidArgument, NotFound
from llmserve.evaluation.data import suite_digest
from llmserve.evaluation.judging.power import detectable, samples_needed
from llmserve.evaluation.plan import Plan, plan
from llmserve.evaluation.reporting.table import render_plan
from llmserve.evaluation.run import EvalOptions
from llmserve.evaluation.suite import load_suite
from tests.evaluation.suites import write_suite

DIFFERENCES = np.random.default_rng(9).normal(0.0, 4.0, 50)
LOSSES = {"kl": {"value": 0.004, "low": 0.003, "high": 0.005}, "flip": {"value": 0.0, "low": 0.0, "high": 0.0}}


def write_report(suite: Path, changes: dict[str, Any] | None = None) -> Path:
    samples = [
        {"baseline": {"scores": {"rougeL": 50.0}}, "engine": {"scores": {"rougeL": 50 + d}}} for d in DIFFERENCES
    ]
    content: dict[str, Any] = {
        "suite": {"digest": suite_digest(load_suite(suite))}, "samples": samples,
        "engine": {"name": "e", "precision": "int8"}, "evidence": {"losses": LOSSES},
    }  # fmt: skip
    path = suite.parent / "earlier.json"
    path.write_text(json.dumps(content | (changes or {})))
    return path


def planned(suite: Path, earlier: Path) -> Plan:
    return plan(EvalOptions(suite), earlier)


def shown(found: Plan) -> str:
    output = StringIO()
    Console(width=80, file=output).print(render_plan(found))
    return output.getvalue()


def test_an_earlier_reports_spread_says_how_many_are_needed(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, margins={"rougeL": 1.0}, loss_margins={"int8": {"kl": 0.005, "flip": 0.1}})
    found = planned(suite, write_report(suite))
    deviation = float(DIFFERENCES.std(ddof=1))
    metric, loss = found.margins
    assert (metric.name, metric.margin) == ("rougeL", 1.0)
    assert metric.deviation == pytest.approx(deviation)
    baseline = 50.0
    assert metric.needed == samples_needed(deviation, 1.0, worst=baseline)
    assert metric.detectable == pytest.approx(detectable(deviation, 32, worst=baseline))
    # a loss that is there leaves less: 0.001 of 0.005
    of_one = 0.002 / (2 * 1.959964) * math.sqrt(50)
    assert loss.name == "kl"
    assert loss.deviation == pytest.approx(of_one, rel=1e-5)
    assert loss.needed == samples_needed(loss.deviation, 0.001)
    assert found.too_few == (metric, loss)
    text = shown(found)
    assert "too few for ROUGE-L, KL" in text
    assert f"{metric.needed}" in text
    assert "50 samples in" in text


def test_no_number_is_enough_where_the_loss_is_larger_than_its_margin(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, margins=None, loss_margins={"int8": {"kl": 0.003}})
    (loss,) = planned(suite, write_report(suite)).margins
    assert loss.needed is None
    assert "no number" in shown(planned(suite, write_report(suite)))


def test_equal_engines_need_as_many_as_the_gate_does(tmp_path: Path) -> None:
    suite = write_suite(tmp_path)
    same = [{side: {"scores": {"rougeL": 50.0}} for side in ("baseline", "engine")}] * 30
    found = planned(suite, write_report(suite, {"samples": same}))
    assert [each.needed for each in found.margins] == [30]
    assert "enough for every margin, at 80 % power" in shown(found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"suite": {"digest": "other"}}, "is from another suite than tiny"),
        ({"samples": []}, "has 0 samples; at least 30 are needed"),
        ({"samples": [{"baseline": {"scores": {}}}] * 30}, "lacks 'rougeL'"),
        ({"suite": 3}, "is not a report of llmserve eval"),
    ],
)
def test_other_reports_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    suite = write_suite(tmp_path)
    with pytest.raises(InvalidArgument, match=message):
        planned(suite, write_report(suite, changes))


def test_what_is_no_report_is_named(tmp_path: Path) -> None:
    suite = write_suite(tmp_path)
    with pytest.raises(NotFound, match=r"report .*gone\.json cannot be read"):
        planned(suite, tmp_path / "gone.json")
    with pytest.raises(InvalidArgument, match="is not a report"):
        planned(suite, suite)


def test_a_suite_without_margins_has_nothing_to_plan(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, margins=None, floors={"rougeL": 10})
    with pytest.raises(InvalidArgument, match="nothing to plan"):
        planned(suite, write_report(suite))
