"""How often the tests of a rollout are wrong, by simulation, and how soon they are right."""

from __future__ import annotations

import math
import random
from itertools import count

import pytest

from llmserve.serving.rollout.evidence import ALPHA, RateTest, RatioTest, median_interval, median_ratio

NUM_RUNS = 600


def alarms(bound: float, rate: float, *, num_cases: int, seed: int) -> int:
    """Runs that are alarmed, of NUM_RUNS that look after each of their cases."""
    rng = random.Random(seed)
    found = 0
    for _ in range(NUM_RUNS):
        test = RateTest(bound)
        for _ in range(num_cases):
            test.add(bad=rng.random() < rate)
            if test.is_exceeded:
                found += 1
                break
    return found


@pytest.mark.parametrize("bound", [0.01, 0.1, 0.5])
def test_a_rate_that_is_just_allowed_is_seldom_called_too_high(bound: float) -> None:
    at_most = NUM_RUNS * ALPHA
    assert alarms(bound, bound, num_cases=500, seed=1) <= at_most + 3 * math.sqrt(at_most)


@pytest.mark.parametrize(("bound", "rate", "cases"), [(0.01, 0.1, 150), (0.1, 0.5, 40), (0.1, 1.0, 3), (0.01, 1.0, 3)])
def test_a_rate_that_is_too_high_is_found_soon(bound: float, rate: float, cases: int) -> None:
    assert alarms(bound, rate, num_cases=cases, seed=2) >= 0.95 * NUM_RUNS


def test_nothing_is_allowed_and_everything_is_allowed() -> None:
    nothing, everything = RateTest(0.0), RateTest(1.0)
    for _ in range(100):
        nothing.add(bad=False)
        everything.add(bad=True)
    assert not nothing.is_exceeded
    assert not everything.is_exceeded
    nothing.add(bad=True)
    assert nothing.is_exceeded


def test_what_is_beyond_doubt_stays_so() -> None:
    test = RateTest(0.1)
    while not test.is_exceeded:
        test.add(bad=True)
    for _ in range(1000):
        test.add(bad=False)
    assert test.is_exceeded
    assert test.rate < 0.1


def test_an_interval_for_the_median_holds_it() -> None:
    rng = random.Random(3)
    for num_samples in (20, 101):
        held = 0
        for _ in range(NUM_RUNS):
            low, high = median_interval([rng.expovariate(1.0) for _ in range(num_samples)], 0.05)
            held += low <= math.log(2) <= high
        assert 0.93 * NUM_RUNS <= held < NUM_RUNS


def test_few_samples_say_nothing() -> None:
    assert median_interval([1.0, 2.0], 0.05) == (-math.inf, math.inf)
    assert median_interval([], 0.05) == (-math.inf, math.inf)
    assert median_ratio([], [1.0]) is None
    assert median_ratio([1.0], [0.0]) is None
    assert median_ratio([3.0, 4.0], [2.0]) == 1.75


def slower_alarms(factor: float, *, seed: int, num_samples: int = 200) -> list[int]:
    """For each run that is alarmed, after how many samples."""
    rng = random.Random(seed)
    found = []
    for _ in range(300):
        test, mine, others = RatioTest(1.5), list[float](), list[float]()
        for number in count(1):
            mine.append(factor * rng.lognormvariate(0, 0.5))
            others.append(rng.lognormvariate(0, 0.5))
            test.look(number, mine, others)
            if test.is_exceeded:
                found.append(number)
            if test.is_exceeded or number == num_samples:
                break
    return found


def test_a_ratio_of_medians_is_judged_with_care_and_soon_enough() -> None:
    assert len(slower_alarms(1.5, seed=4)) <= 300 * ALPHA + 3
    assert len(slower_alarms(3.0, seed=5)) >= 290
    assert max(slower_alarms(6.0, seed=6)) <= 40


def test_too_few_of_the_others_are_no_comparison() -> None:
    test = RatioTest(1.5)
    test.look(1000, [9.0] * 500, [1.0] * 19)
    assert not test.is_exceeded
    test.look(1000, [9.0] * 500, [1.0] * 20)
    assert test.is_exceeded
