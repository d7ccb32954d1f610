"""How often the gate is wrong, on a real engine's answers to the whole suite."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.evaluation.judging.evidence import Evidence
from llmserve.evaluation.judging.gate import GateResult, Verdict, judge, judge_losses
from llmserve.evaluation.reporting.report import Report
from llmserve.evaluation.run import EvalOptions, evaluate
from tests.e2e.conftest import CHECKPOINT, ROOT
from tests.evaluation.test_planted_defects import Silent
from tools.gate_rates import World, rates

SUITE = ROOT / "eval" / "suites" / "docstrings.yaml"
NUM_RUNS = 50


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    engine = tmp_path_factory.mktemp("rates") / "engine"
    build_engine(CHECKPOINT, engine, BuildOptions(dtype="float16", max_seq_len=512))
    return evaluate(EvalOptions(SUITE, CHECKPOINT, engine=engine), Silent())


def judged(report: Report, chosen: list[int]) -> GateResult:
    """The same run, had the suite had these samples only."""
    scores = [{name: values[chosen] for name, values in side.items()} for side in report.scores]
    whole = report.evidence
    assert isinstance(whole, Evidence)
    begins = np.cumsum(whole.lengths) - whole.lengths
    positions = np.concatenate([np.arange(begins[index], begins[index] + whole.lengths[index]) for index in chosen])
    evidence = Evidence(
        whole.divergence[positions],
        whole.other_best[positions],
        whole.margins[positions],
        whole.surprise[positions],
        whole.lengths[chosen],
    )
    rules = report.rules
    metrics = judge(scores[0], scores[1], margins=rules["margins"], floors=rules["floors"]).metrics
    return GateResult(metrics, judge_losses(evidence, rules["loss_margins"]["float"]))


def test_fifty_runs_of_an_unchanged_engine_give_no_false_fail(report: Report) -> None:
    assert report.gate.verdict is Verdict.PASS
    generator = np.random.default_rng(50)
    for num_samples in (50, 400):
        drawn = (generator.choice(len(report.samples), num_samples, replace=False).tolist() for _ in range(NUM_RUNS))
        verdicts = Counter(judged(report, chosen).verdict for chosen in drawn)
        assert verdicts[Verdict.FAIL] == 0
        least = NUM_RUNS // 2 if num_samples == 400 else 0  # ten times fewer than the suite has are too few
        assert verdicts[Verdict.PASS] >= least


def test_engines_that_lose_twice_the_margin_do_not_pass(report: Report) -> None:
    world = World.of(report.to_json())
    for verdict in (world.text_verdict, world.kl_verdict):
        for loss, num_samples, found in rates(verdict, trials=20, losses=(0.0, 2.0), sizes=(500,)):
            assert num_samples == 500
            if loss:
                assert found[Verdict.PASS] <= 3
            else:
                assert found[Verdict.FAIL] == 0
                assert found[Verdict.PASS] >= 15
