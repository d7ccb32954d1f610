from __future__ import annotations

import numpy as np
import pytest

from llmserve.evaluation.judging.gate import Verdict, judge, judge_metric
from llmserve.evaluation.judging.power import Flips

GENERATOR = np.random.default_rng(0)
BASELINE = np.clip(GENERATOR.normal(20, 15, 500), 0, 100)


def verdict_of(engine: np.ndarray, margin: float = 0.3) -> Verdict:
    return judge_metric("rougeL", BASELINE, engine, margin=margin).verdict


def test_identical_outputs_pass() -> None:
    assert verdict_of(BASELINE.copy()) is Verdict.PASS
    assert verdict_of(BASELINE.copy(), margin=0.0) is Verdict.INCONCLUSIVE  # no number of samples shows that


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


def test_a_loss_of_exactly_the_margin_is_neither() -> None:
    assert verdict_of(BASELINE - 0.3) is Verdict.INCONCLUSIVE
    assert verdict_of(BASELINE - 0.1) is Verdict.PASS


def test_samples_that_may_have_missed_a_spoiled_answer_clear_nobody() -> None:
    """One answer more, worth nothing, may be drawn three times: 3 * 20 / n must be within the margin."""
    for num_samples, verdict in ((150, Verdict.INCONCLUSIVE), (250, Verdict.PASS)):
        same = np.full(num_samples, 20.0)
        result = judge_metric("rougeL", same, same, margin=0.3)
        assert result.verdict is verdict
        if verdict is Verdict.INCONCLUSIVE:
            assert result.reason == (
                "rougeL: with one more worthless answer, the engine could lose 0.40: 150 samples may have missed "
                "such answers; about 198 clear an engine that loses nothing"
            )
    assert judge_metric("rougeL", same[:150], same[:150] - 1, margin=0.3).verdict is Verdict.FAIL


def test_a_floor_fails_whatever_the_baseline_does() -> None:
    low = np.full(40, 3.0)
    result = judge_metric("rouge1", low, low, margin=0.3, floor=15)
    assert result.verdict is Verdict.FAIL
    assert "below the floor of 15" in result.reason


def test_nobody_passes_where_the_baseline_scores_nothing() -> None:
    nothing = np.zeros(500)
    result = judge_metric("rougeL", nothing, nothing, margin=0.3)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "the baseline itself scores 0.00" in result.reason
    assert judge_metric("rougeL", nothing, nothing, margin=None, floor=0.0).verdict is Verdict.INCONCLUSIVE
    nearly = np.full(500, 0.2)
    assert judge_metric("rougeL", nearly, nothing, margin=0.3).verdict is Verdict.INCONCLUSIVE
    assert judge_metric("rougeL", nearly, nearly, margin=0.1).verdict is Verdict.PASS


def test_a_floor_alone_asks_nothing_of_the_baseline() -> None:
    """A baseline that is not held to JSON writes none; an engine that is does."""
    nothing, everything = np.zeros(40), np.full(40, 100.0)
    assert judge_metric("json_valid", nothing, everything, margin=None, floor=95).verdict is Verdict.PASS
    assert judge_metric("json_valid", nothing, everything, margin=5, floor=95).verdict is Verdict.INCONCLUSIVE


def test_what_is_right_or_wrong_has_flips() -> None:
    baseline, engine = np.repeat([100.0, 0.0], [300, 200]), np.repeat([100.0, 0.0], [310, 190])
    engine[:4] = 0.0
    result = judge_metric("acc", baseline, engine, margin=5.0)
    assert result.flips == Flips(lost=4, gained=10)
    assert result.difference.mean == pytest.approx(100 * 6 / 500)
    assert result.verdict is Verdict.PASS
    assert judge_metric("rougeL", baseline, engine, margin=5.0).flips is None
    engine[:60] = 0.0
    assert judge_metric("acc", baseline, engine, margin=5.0).verdict is Verdict.FAIL


def test_every_result_says_what_could_have_been_seen() -> None:
    noise = GENERATOR.normal(0, 15, 500)
    result = judge_metric("rougeL", BASELINE, BASELINE + noise, margin=0.3)
    rare = BASELINE.mean() / 500
    of_mean = noise.std() / np.sqrt(500)
    wanted = rare + 0.84 * of_mean + 1.96 * np.hypot(of_mean, rare)
    assert result.detectable == pytest.approx(wanted, rel=0.01)
    equal = judge_metric("rougeL", BASELINE, BASELINE - 1, margin=0.3)
    assert equal.detectable == pytest.approx(2.96 * rare, rel=0.01)


@pytest.mark.parametrize(("num_samples", "verdict"), [(29, Verdict.INCONCLUSIVE), (30, Verdict.PASS)])
def test_too_few_samples_clear_no_engine(num_samples: int, verdict: Verdict) -> None:
    few = BASELINE[:num_samples]
    result = judge_metric("rougeL", few, few, margin=3.0)
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
