from __future__ import annotations

import math

import numpy as np
import pytest

from llmserve.core import TopTokens
from llmserve.evaluation.decisions import Decision
from llmserve.evaluation.judging.evidence import Evidence, Loss
from llmserve.evaluation.judging.gate import LossResult, Verdict, judge_losses

SAMPLES = 60
POSITIONS = 12


def decision(best: float, *, swapped: bool = False) -> Decision:
    """On token 1 of three; its probability, or that of token 2 with `swapped`, is `best`."""
    rest = (1 - best) * 2 / 3
    ids, values = ((2, 1, 3) if swapped else (1, 2, 3)), (best, rest, rest / 2)
    told = dict(zip(ids, map(math.log, values), strict=True))
    return Decision(1, told[1], TopTokens(ids, tuple(map(math.log, values))))


BASELINE = [[decision(0.7)] * POSITIONS for _ in range(SAMPLES)]


def result_of(evidence: Evidence | str, loss: Loss, margin: float) -> LossResult:
    results = judge_losses(evidence, {loss.value: margin})
    return next(result for result in results if result.loss is loss)


def test_an_equal_engine_loses_nothing() -> None:
    evidence = Evidence.of(BASELINE, BASELINE)
    assert evidence.num_positions == SAMPLES * POSITIONS
    for loss in Loss:
        result = result_of(evidence, loss, 0.0)
        assert (result.interval.mean, result.interval.high, result.verdict) == (0, 0, Verdict.PASS)


def test_every_loss_has_its_own_meaning() -> None:
    """One position in ten is another token's; the others are a little less sure."""
    engine = [[decision(0.6), *[decision(0.7)] * 8, decision(0.5, swapped=True)] for _ in range(SAMPLES)]
    evidence = Evidence.of([sample[:10] for sample in BASELINE], engine)
    unsure, swapped = (
        sum(math.exp(p) * (p - q) for p, q in zip(decision(0.7).top.log_probs, other, strict=True))
        for other in (decision(0.6).top.log_probs, (math.log(1 / 3), math.log(0.5), math.log(1 / 6)))
    )
    values = {loss: evidence.interval(loss).mean for loss in Loss}
    assert values[Loss.KL] == pytest.approx((unsure + swapped) / 10)
    assert values[Loss.KL_P99] == pytest.approx(swapped)
    assert values[Loss.TOP1] == pytest.approx(10)
    surprise = (math.log(0.7 / 0.6) + math.log(0.7 * 3)) / 10
    assert values[Loss.PERPLEXITY] == pytest.approx(100 * (math.exp(surprise) - 1))
    assert values[Loss.FLIP] == pytest.approx(math.log(0.7 / 0.2))
    assert evidence.by_sample() == pytest.approx([values[Loss.KL]] * SAMPLES)


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_one_number_that_is_not_finite_fails_every_loss(broken: float) -> None:
    engine = [[*sample] for sample in BASELINE]
    engine[7][3] = Decision(1, broken, TopTokens((1, 2, 3), (broken,) * 3))
    evidence = Evidence.of(BASELINE, engine)
    for loss in Loss:
        result = result_of(evidence, loss, 1e9)
        assert (result.verdict, math.isfinite(result.interval.high)) == (Verdict.FAIL, True)
        assert "not finite at 1 of 720 positions" in result.reason
    assert all(map(math.isfinite, evidence.by_sample()))


def test_verdicts() -> None:
    rng = np.random.default_rng(2)
    engine = [[decision(float(rng.uniform(0.4, 0.9))) for _ in range(POSITIONS)] for _ in range(SAMPLES)]
    evidence = Evidence.of(BASELINE, engine)
    interval = evidence.interval(Loss.KL)
    assert interval.low < interval.mean < interval.high
    assert result_of(evidence, Loss.KL, interval.high).verdict is Verdict.PASS
    inconclusive = result_of(evidence, Loss.KL, interval.mean)
    assert inconclusive.verdict is Verdict.INCONCLUSIVE
    assert "cannot tell whether it is at most" in inconclusive.reason
    failed = result_of(evidence, Loss.KL, interval.low / 2)
    assert failed.verdict is Verdict.FAIL
    assert failed.reason.startswith("kl: is more than")
    assert not next(result for result in judge_losses(evidence, {}) if result.loss is Loss.KL).is_judged


def test_few_samples_clear_nobody_and_can_convict() -> None:
    few = Evidence.of(BASELINE[:29], BASELINE[:29])
    assert "29 samples are too few" in result_of(few, Loss.KL, 0.1).reason
    assert result_of(few, Loss.KL, 0.1).verdict is Verdict.INCONCLUSIVE
    swapped = [[decision(0.7, swapped=True)] * POSITIONS] * 29
    assert result_of(Evidence.of(BASELINE[:29], swapped), Loss.FLIP, 0.1).verdict is Verdict.FAIL


def test_no_evidence_is_no_pass() -> None:
    result = result_of("model 'tensorrt_llm' has no such input", Loss.FLIP, 0.1)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "has no such input" in result.reason
    assert judge_losses("why ever", {}) == ()


def test_what_has_no_room_is_left_out() -> None:
    shorter = [sample[:-1] for sample in BASELINE[:30]] + [[] for _ in range(30)]
    evidence = Evidence.of(BASELINE, shorter)
    assert evidence.num_positions == 30 * (POSITIONS - 1)
    assert evidence.by_sample()[-1] == 0.0
