"""Arrival processes: their rate, and how they huddle."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from llmserve.benchmark.arrivals import arrival_times, parse_arrivals
from llmserve.errors import InvalidArgument

RATE, COUNT = 20.0, 20_000


def times(text: str) -> np.ndarray:
    return np.array(list(islice(arrival_times(parse_arrivals(text), RATE, np.random.default_rng(3)), COUNT)))


@pytest.mark.parametrize(
    ("text", "variation"),  # of the gaps: deviation by mean
    [("constant", 0.0), ("poisson", 1.0), ("gamma:1", 1.0), ("gamma:0.25", 2.0), ("gamma:4", 0.5), ("bursts:5", 2.0)],
)
def test_all_have_the_rate_and_each_its_own_variation(text: str, variation: float) -> None:
    gaps = np.diff(times(text))
    assert 1 / gaps.mean() == pytest.approx(RATE, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, abs=0.06)


def test_the_first_one_comes_at_once_and_time_never_goes_back() -> None:
    for text in ("constant", "poisson", "gamma:0.1", "bursts:3"):
        found = times(text)
        assert found[0] == 0
        assert (np.diff(found) >= 0).all()


def test_bursts_come_together() -> None:
    assert times("bursts:4")[:9].tolist() == pytest.approx([0, 0, 0, 0, 0.2, 0.2, 0.2, 0.2, 0.4])


@pytest.mark.parametrize(
    "text",
    ["", "uniform", "gamma", "gamma:0", "gamma:-1", "gamma:nan", "gamma:inf", "bursts:0", "bursts:2.5", "poisson:3"],
)
def test_what_is_no_process_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is not an arrival process: poisson, constant, gamma:SHAPE"):
        parse_arrivals(text)
