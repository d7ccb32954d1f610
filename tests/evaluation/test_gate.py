from __future__ import annotations

import numpy as np
import pytest

from llmserve.evaluation.gate import Verdict, judge, judge_metric

GENERATOR = np.random.default_rng(0)
BASELINE = np.clip(GENERATOR.normal(20, 15, 500), 0, 100)


def verdict_of(engine: np.ndarray, margin: float = 0.3) -> Verdict:
    return judge_metric("rougeL", BASELINE, engine, margin=margin).verdict


def test_identical_outputs_pass() -> None:
    assert verdict_of(BASELINE.copy()) is Verdict.PASS
    assert verdict_of(BASELINE.copy(), margin=0.0) is Verdict.PASS


def test_a_loss_of_a_point_fails() -> None:
    assert verdict_of(BASELINE - 1) is Verdict.FAIL
    assert verdict_of(BASELINE - 1 + GENERATOR.normal(0, 3, 500)) is Verdict.FAIL


def test_a_few_flipped_samples_pass() -> None:
    engine = BASELINE.copy()
    engine[:5] += (8, -8, 5, -6, 1)
    assert verdict_of(engine) is Verdict.PASS


def test_a_gain_passes() -> None:
    assert verdict_of(BASELINE + np.abs(GENERATOR.normal(0, 10, 500))) is Verdict.PASS


def test_wide_noise_is_inconclusive() -> None:
    noise = GENERATOR.normal(0, 15, 500)
    assert verdict_of(BASELINE + noise - noise.mean()) is Verdict.INCONCLUSIVE


def test_a_loss_of_exactly_the_margin_passes() -> None:
    assert verdict_of(BASELINE - 0.3) is Verdict.PASS


def test_a_floor_fails_whatever_the_baseline_does() -> None:
    low = np.full(40, 3.0)
    result = judge_metric("rouge1", low, low, margin=0.3, floor=15)
    assert result.verdict is Verdict.FAIL
    assert "under the floor of 15" in result.reason


def test_nobody_passes_where_the_baseline_scores_nothing() -> None:
    nothing = np.zeros(500)
    result = judge_metric("rougeL", nothing, nothing, margin=0.3)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "the baseline itself scores 0.00" in result.reason
    assert judge_metric("rougeL", nothing, nothing, margin=None, floor=0.0).verdict is Verdict.INCONCLUSIVE
    nearly = np.full(500, 0.2)
    assert judge_metric("rougeL", nearly, nothing, margin=0.3).verdict is Verdict.INCONCLUSIVE
    assert judge_metric("rougeL", nearly, nearly, margin=0.1).verdict is Verdict.PASS


@pytest.mark.parametrize(("num_samples", "verdict"), [(29, Verdict.INCONCLUSIVE), (30, Verdict.PASS)])
def test_too_few_samples_clear_no_engine(num_samples: int, verdict: Verdict) -> None:
    few = BASELINE[:num_samples]
    result = judge_metric("rougeL", few, few, margin=0.3)
    assert result.verdict is verdict
    assert ("29 samples are too few" in result.reason) == (verdict is Verdict.INCONCLUSIVE)
    assert judge_metric("rougeL", few, few - 5, margin=0.3).verdict is Verdict.FAIL  # but they can convict one
    assert judge_metric("rougeL", few, few, margin=None, floor=1.0).verdict is verdict


def test_a_floor_without_a_margin_has_a_reason() -> None:
    result = judge({"rouge1": BASELINE}, {"rouge1": BASELINE}, margins={}, floors={"rouge1": 10})
    assert result.verdict is Verdict.PASS
    assert result.reasons == [f"rouge1 {BASELINE.mean():.2f} reaches the floor of 10"]


def test_the_worst_metric_decides_and_is_named() -> None:
    baseline = {"rouge1": BASELINE, "rouge2": BASELINE, "rougeL": BASELINE}
    engine = {"rouge1": BASELINE, "rouge2": BASELINE - 2, "rougeL": BASELINE - 50}
    result = judge(baseline, engine, margins={"rouge1": 0.3, "rouge2": 0.3}, floors={})
    assert result.verdict is Verdict.FAIL
    assert len(result.reasons) == 1
    assert "rouge2: the engine loses more than 0.3 (-2.00" in result.reasons[0]
    unjudged = result.metrics[2]
    assert (unjudged.metric, unjudged.margin) == ("rougeL", None)
    assert unjudged.difference.mean == pytest.approx(-50)
    assert judge(baseline, engine, margins={"rouge1": 0.3}, floors={}).verdict is Verdict.PASS
