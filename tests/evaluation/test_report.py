from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from llmserve.core import TopTokens
from llmserve.errors import InvalidArgument
from llmserve.evaluation.answers import Answer, Performance, Sample
from llmserve.evaluation.decisions import Decision
from llmserve.evaluation.judging.evidence import Loss
from llmserve.evaluation.judging.gate import Verdict
from llmserve.evaluation.reporting.html_report import render_html
from llmserve.evaluation.reporting.report import Report, Side
from llmserve.evaluation.reporting.table import render
from llmserve.evaluation.run import compare
from llmserve.evaluation.suite import load_suite
from tests.evaluation.suites import ROWS, write_choice_suite, write_suite

SAMPLES = [Sample(row["id"], row["document"], row["summary"]) for row in ROWS]
DECISIONS = tuple(
    Decision(token, -0.125, TopTokens((token, 1), (-0.125, -0.125 - margin)))
    for token, margin in zip((5, 6, 7, 8, 2), (1.0, 0.25, 2.0, 3.0, 1.0), strict=True)
)
GOOD = [Answer(sample.reference, 9, 4, 0.5, (5, 6, 7, 8), DECISIONS) for sample in SAMPLES]
DAMAGED = [Answer("x y z", 9, 4, 0.25, (5, 9, 9, 9)) for _ in SAMPLES]
CHOSEN = {"b": (-2.0, -1.0), "a": (-1.0, -2.0)}
FACTS = {"name": "e", "dtype": "float16", "in_flight": "1", "source": "stored"}


def report(tmp_path: Path, engine: list[Answer], **suite_changes: object) -> Report:
    suite = load_suite(write_suite(tmp_path, **suite_changes))
    sides = [Side(FACTS, answers, Performance.of(answers, 2.0)) for answers in (GOOD, engine)]
    return compare(suite, "d" * 64, SAMPLES, sides[0], sides[1], [answer.decisions for answer in GOOD])


def shown(report: Report) -> str:
    output = StringIO()
    Console(width=80, file=output).print(render(report))
    return output.getvalue()


def test_an_equal_engine_passes(tmp_path: Path) -> None:
    result = report(tmp_path, GOOD)
    assert result.passed
    assert result.parity.exact_match_rate == 1.0
    assert "PASS: the engine loses no more than the suite allows (ROUGE-L)" in shown(result)


def test_a_damaged_engine_fails(tmp_path: Path) -> None:
    result = report(tmp_path, DAMAGED, inconclusive="pass")
    assert not result.passed
    assert (result.parity.num_equal, result.parity.largest_margin) == (0, 0.25)
    text = shown(result)
    assert "FAIL: rougeL: the engine loses more than 10" in text
    assert "-100.00" in text
    assert "same answer: 0 of 32" in text


@pytest.mark.parametrize(
    ("baseline", "compared"),
    [({"source": "stored, elsewhere"}, False), ({"in_flight": "8"}, False), ({"source": "computed in this run"}, True)],
)
def test_only_times_of_one_run_are_compared(tmp_path: Path, baseline: dict[str, str], compared: bool) -> None:
    result = report(tmp_path, GOOD)
    facts = FACTS | {"source": "computed in this run"} | baseline
    text = shown(replace(result, baseline=replace(result.baseline, facts=facts)))
    assert ("+0 %" in text) == compared
    assert re.search(r"^ *tokens/s +\d+ " if not compared else r"^ *tokens/s +\d+ +\d+ ", text, re.MULTILINE)


@pytest.mark.parametrize("evidence", ["required", "optional"])
def test_an_engine_that_no_criterion_applies_to_fails(tmp_path: Path, evidence: str) -> None:
    rules = {"margins": {}, "loss_margins": {"int4": {"kl": 0.01}}, "evidence": evidence, "inconclusive": "pass"}
    result = report(tmp_path, GOOD, **rules)
    assert (result.passed, result.gate.verdict) == (False, Verdict.FAIL)
    assert "FAIL: no criterion of the suite applies to this engine" in shown(result)


@pytest.mark.parametrize("rule", ["pass", "fail"])
def test_the_suite_decides_what_inconclusive_means(tmp_path: Path, rule: str) -> None:
    result = report(tmp_path, [*GOOD[:-1], DAMAGED[0]], inconclusive=rule)
    assert result.passed == (rule == "pass")
    assert f"{rule.upper()} (inconclusive)" in shown(result)
    assert re.search(r"^ *ROUGE-L .* inconclusive *$", shown(result), re.MULTILINE)  # whole, on 80 columns
    assert "…" not in shown(result)


def test_a_report_is_one_json_document(tmp_path: Path) -> None:
    path = tmp_path / "results" / "r.json"
    report(tmp_path, [*GOOD[:-1], DAMAGED[0]]).save(path)
    content = json.loads(path.read_text())
    assert content.keys() == {
        "format", "passed", "verdict", "reasons", "suite", "baseline", "engine", "metrics", "evidence", "parity",
        "versions", "samples",
    }  # fmt: skip
    assert content["suite"] == {
        "name": "tiny", "digest": "d" * 64, "num_samples": 32, "complete": True,
        "rules": {
            "data": [hashlib.sha256((tmp_path / "rows.jsonl").read_bytes()).hexdigest()],
            "columns": {"reference": "summary", "choices": None}, "prompt": [["user", "Summarize:\n{document}"]],
            "max_tokens": 8, "max_input_tokens": None, "margins": {"rougeL": 10.0}, "loss_margins": {},
            "evidence": "required", "floors": {}, "num_samples": 32, "stemming": True, "inconclusive": "fail",
        },
    }  # fmt: skip
    assert content["metrics"].keys() == {"rouge1", "rouge2", "rougeL", "rougeLsum"}
    assert content["metrics"]["rougeL"]["difference"] == pytest.approx(-100 / 32)
    detectable = (1 + 0.84 + 1.96 * 2**0.5) * 100 / 32  # of one answer of 32 that is lost, and one more
    assert content["metrics"]["rougeL"]["detectable"] == pytest.approx(detectable, rel=0.01)
    assert "flips" not in content["metrics"]["rougeL"]
    assert content["engine"]["latency_seconds"].keys() == {"mean", "p50", "p95"}
    assert content["baseline"]["tokens_per_second"] == 64.0
    assert content["parity"]["divergences"] == [{"id": "row-31", "position": 1, "margin": 0.25}]
    assert content["evidence"]["positions"] == 32 * 5
    assert content["evidence"]["losses"]["kl"] == {
        "value": 0.0, "low": 0.0, "high": 0.0, "margin": None, "verdict": "pass", "detectable": 0.0
    }  # fmt: skip
    assert content["evidence"]["kl_of_samples"] == [0.0] * 32
    last = content["samples"][-1]
    assert (last["id"], last["reference"], last["engine"]["text"]) == ("row-31", ROWS[31]["summary"], "x y z")
    assert last["engine"]["scores"]["rougeL"] == 0
    assert last["baseline"]["scores"]["rougeL"] == 100
    assert content["versions"]["rouge-score"]


def test_a_suite_shows_the_metrics_that_it_names(tmp_path: Path) -> None:
    changes = {"metrics": ["chrf", "exact_match"], "margins": {"exact_match": 5.0}}
    result = report(tmp_path, [*GOOD[:-1], DAMAGED[0]], **changes)
    content = result.to_json()
    assert list(content["metrics"]) == ["chrf", "exact_match"]
    assert content["metrics"]["exact_match"]["flips"] == {"lost": 1, "gained": 0, "p_value": 1.0}
    assert content["samples"][-1]["engine"]["scores"].keys() == {"chrf", "exact_match"}
    text = shown(result)
    assert "ROUGE" not in text
    assert re.search(r"exact +100.00 +96.88 +-3.12", text)
    assert "exact: right answers lost 1, gained 0 (McNemar's p 1)" in text
    assert "detectable losses (80 % power): chrF" in text


def test_choices_are_compared_by_likelihood(tmp_path: Path) -> None:
    suite = load_suite(write_choice_suite(tmp_path))
    samples = [Sample(row["id"], "p", "b", ("a", "b")) for row in ROWS]
    right, wrong = ([Answer(text, 9, 4, 0.5, log_likelihoods=values) for _ in ROWS] for text, values in CHOSEN.items())
    sides = [Side(FACTS, answers, Performance.of(answers, 2.0)) for answers in (right, [*right[:12], *wrong[12:]])]
    result = compare(suite, "d" * 64, samples, sides[0], sides[1], "choices are scored, not generated")
    assert not result.passed
    text = shown(result)
    assert "acc: right answers lost 20, gained 0 (McNemar's p 1.9e-06)" in text
    assert "same answer: 12 of 32" in text
    last = result.to_json()["samples"][-1]
    assert (last["choices"], last["engine"]["text"]) == (["a", "b"], "a")
    assert last["engine"]["log_likelihoods"] == [-1.0, -2.0]
    assert last["engine"]["scores"] == {"acc": 0.0, "acc_norm": 0.0, "acc_bytes": 0.0}
    assert compare(suite, "d" * 64, samples, sides[0], sides[0], "choices are weighed").passed


def test_other_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgument, match="sample row-31: 9 prompt tokens for the baseline, but 8 prompt tokens for the engine"
    ):
        report(tmp_path, [*GOOD[:-1], Answer("", 8, 0, 0.1, ())])


def test_other_prompt_ids_are_refused_even_of_the_same_number(tmp_path: Path) -> None:
    suite = load_suite(write_suite(tmp_path))
    sides = [
        Side(FACTS, [replace(answer, prompt_digest=digest) for answer in GOOD], Performance.of(GOOD, 2.0))
        for digest in ("ab12", "cd34")
    ]
    assert compare(suite, "d" * 64, SAMPLES, sides[0], sides[0], "untold").passed
    with pytest.raises(InvalidArgument, match=r"row-0: 9 prompt tokens \(ids ab12\) for the baseline, but 9 .*cd34"):
        compare(suite, "d" * 64, SAMPLES, sides[0], sides[1], "untold")


def test_the_margins_are_those_of_the_engines_precision(tmp_path: Path) -> None:
    suite = load_suite(write_suite(tmp_path, loss_margins={"float": {"kl": 0.01}, "int8": {"kl": 1.0, "flip": 0.1}}))
    other_best = tuple(replace(one, top=TopTokens((1, one.token), one.top.log_probs)) for one in DECISIONS)
    decisions = [other_best for _ in SAMPLES]

    def judged(precision: str) -> Report:
        engine = Side(FACTS | {"precision": precision}, GOOD, Performance.of(GOOD, 2.0))
        return compare(suite, "d" * 64, SAMPLES, engine, engine, decisions)

    assert judged("int4").passed
    assert [result.loss for result in judged("float").gate.losses if result.is_judged] == [Loss.KL]
    assert not judged("float").passed
    failed = judged("int8")
    assert [reason.partition(":")[0] for reason in failed.gate.reasons] == ["flip"]
    assert "FAIL: flip: is more than 0.1 (3)" in shown(failed)
    assert re.search(r"flip, nat +3 +0.1 +fail", shown(failed))


def test_what_was_not_told_is_said(tmp_path: Path) -> None:
    suite = load_suite(write_suite(tmp_path, loss_margins={"float": {"kl": 0.01}}))
    side = Side(FACTS, GOOD, Performance.of(GOOD, 2.0))
    result = compare(suite, "d" * 64, SAMPLES, side, side, "no input named return_prompt_log_probs")
    assert not result.passed
    assert "no evidence from the baseline's own answers: no input named" in shown(result)
    optional = load_suite(write_suite(tmp_path, loss_margins={"float": {"kl": 0.01}}, evidence="optional"))
    assert compare(optional, "d" * 64, SAMPLES, side, side, "no such input").passed  # by ROUGE alone
    told = [answer.decisions for answer in GOOD]
    assert [r.loss for r in compare(optional, "d" * 64, SAMPLES, side, side, told).gate.losses if r.is_judged]
    assert result.to_json()["evidence"]["not_measured"] == "no input named return_prompt_log_probs"


def test_floors_alone_judge(tmp_path: Path) -> None:
    content = report(tmp_path, GOOD, margins=None, floors={"rouge1": 15}).to_json()
    assert (content["passed"], content["verdict"]) == (True, "pass")
    assert content["reasons"] == ["rouge1 100.00 reaches the floor of 15"]
    failed = report(tmp_path, DAMAGED, margins=None, floors={"rouge1": 15}).to_json()
    assert (failed["passed"], failed["reasons"]) == (False, ["rouge1 0.00 is below the floor of 15"])


def test_an_engine_of_another_checkpoint_is_noted_but_judged(tmp_path: Path) -> None:
    suite = load_suite(write_suite(tmp_path))

    def judged(engine_digest: str) -> Report:
        digests = ("1" * 64, engine_digest)
        sides = [Side(FACTS | {"checkpoint_digest": digest}, GOOD, Performance.of(GOOD, 2.0)) for digest in digests]
        return compare(suite, "d" * 64, SAMPLES, sides[0], sides[1], "untold")

    other = judged("2" * 64)
    assert other.passed
    assert other.to_json()["engine"]["checkpoint_digest"] == "2" * 64
    assert "built from another checkpoint (222222222222)" in shown(other)
    assert "another checkpoint" not in shown(judged("1" * 64))


def test_text_alone_is_compared_as_text(tmp_path: Path) -> None:
    result = report(tmp_path, [Answer(answer.text, 9, 4, 0.5) for answer in GOOD])
    assert (result.parity.num_equal, result.parity.divergences) == (32, ())


def test_drafted_tokens_are_counted(tmp_path: Path) -> None:
    drafting = [replace(answer, num_drafted=4, num_accepted=3) for answer in GOOD]
    result = report(tmp_path, drafting)
    assert result.to_json()["engine"]["drafts"] == {"drafted_tokens": 128, "accepted_tokens": 96}
    assert "drafts" not in result.to_json()["baseline"]
    for text in (shown(result), render_html(result)):
        assert "96 of 128 drafted tokens accepted" in text
    assert "drafted tokens" not in shown(report(tmp_path, GOOD))
