from __future__ import annotations

import numpy as np
import pytest

from llmserve.evaluation.judging.gate import Verdict, judge_metric
from llmserve.evaluation.judging.power import Flips, detectable, detectable_of, deviation_of, samples_needed, spread
from llmserve.evaluation.judging.statistics import paired_bootstrap


@pytest.mark.parametrize(
    ("lost", "gained", "p_value"),
    [(0, 0, 1), (0, 1, 1), (3, 3, 1), (0, 6, 2 / 64), (6, 0, 2 / 64), (1, 5, 14 / 64), (12, 4, 5034 / 65536)],
)
def test_mcnemars_test_is_the_binomial_one(lost: int, gained: int, p_value: float) -> None:
    assert Flips(lost, gained).p_value == pytest.approx(p_value)


def test_flips_are_counted_in_both_directions() -> None:
    baseline, engine = np.array([100.0, 100, 0, 0, 100]), np.array([0.0, 100, 100, 0, 0])
    assert Flips.of(engine - baseline) == Flips(lost=2, gained=1)


def test_four_fifths_of_equal_engines_pass_with_as_many_samples_as_the_plan_says() -> None:
    """What is claimed of the number is what the gate itself does."""
    needed = samples_needed(4.0, 0.8, worst=50.0)
    assert needed == 368
    generator = np.random.default_rng(11)
    baseline = np.full(needed, 50.0)
    passed = 0
    for seed in range(200):
        differences = generator.normal(0.0, 4.0, needed)
        result = judge_metric("rougeL", baseline, baseline + differences, margin=0.8, seed=seed)
        passed += result.verdict is Verdict.PASS
    assert 145 <= passed <= 175  # of 160 expected; two and a half standard deviations


def test_what_is_detectable_shrinks_with_the_root_of_the_samples() -> None:
    assert detectable(4.0, 197) == pytest.approx(0.8, rel=0.01)
    assert detectable(4.0, 4 * 197) == pytest.approx(0.4, rel=0.01)
    assert samples_needed(4.0, 0.8) == 197
    assert samples_needed(0.0, 0.0) == 1
    assert samples_needed(0.0, 0.3, worst=21.0) == 208
    assert detectable(0.0, 208, worst=21.0) == pytest.approx(0.3, rel=0.01)
    assert samples_needed(4.0, 0.0) is None
    assert samples_needed(4.0, -0.1) is None
    assert spread(np.array([3.0])) == 0.0


def test_an_interval_tells_the_same_as_the_samples_that_it_was_made_from() -> None:
    differences = np.random.default_rng(4).normal(0.2, 3.0, 400)
    interval = paired_bootstrap(differences)
    assert deviation_of(interval, 400) == pytest.approx(spread(differences), rel=0.05)
    assert detectable_of(interval) == pytest.approx(detectable(spread(differences), 400), rel=0.05)
