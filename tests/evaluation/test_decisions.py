from __future__ import annotations

import math

import numpy as np
import pytest

from llmserve.core import TopTokens
from llmserve.evaluation.decisions import Decision, divergence, pack, unpack

RNG = np.random.default_rng(3)


def decision_of(logits: np.ndarray, token: int, most: int) -> Decision:
    log_probs = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-log_probs)[:most]
    return Decision(
        token, float(log_probs[token]), TopTokens(tuple(map(int, best)), tuple(map(float, log_probs[best])))
    )


def whole_divergence(one: np.ndarray, other: np.ndarray) -> float:
    p, q = (np.exp(logits) / np.exp(logits).sum() for logits in (one, other))
    return float((p * np.log(p / q)).sum())


def test_with_every_token_told_it_is_the_divergence() -> None:
    one, other = RNG.normal(size=(2, 12))
    found = divergence(decision_of(one, 4, 12), decision_of(other, 4, 12))
    assert found == pytest.approx(whole_divergence(one, other), abs=1e-12)


@pytest.mark.parametrize("most", [1, 3, 8])
def test_with_fewer_it_is_less_and_still_sees_a_difference(most: int) -> None:
    for _ in range(20):
        one = RNG.normal(size=40) * 3
        other = one + RNG.normal(size=40)
        found = divergence(decision_of(one, int(one.argmax()), most), decision_of(other, int(one.argmax()), most + 2))
        assert 0 < found <= whole_divergence(one, other)


def test_equal_distributions_diverge_by_nothing() -> None:
    logits = RNG.normal(size=40)
    assert divergence(decision_of(logits, 3, 5), decision_of(logits, 3, 20)) == pytest.approx(0, abs=1e-12)


def test_a_token_that_only_one_side_tells_counts_among_the_others() -> None:
    """The engine thinks that the baseline's token is out of the question, and another one certain."""
    expected = Decision(1, math.log(0.9), TopTokens((1, 2), (math.log(0.9), math.log(0.1))))
    actual = Decision(1, math.log(0.01), TopTokens((3, 4), (math.log(0.9), math.log(0.05))))
    assert divergence(expected, actual) == pytest.approx(0.9 * math.log(90) + 0.1 * math.log(0.1 / 0.99))


def test_impossible_leftovers_are_no_infinity() -> None:
    certain = Decision(1, 0.0, TopTokens((1, 2), (0.0, -40.0)))
    doubtful = Decision(1, math.log(0.5), TopTokens((1,), (math.log(0.5),)))
    assert math.isfinite(divergence(doubtful, certain))
    assert divergence(certain, doubtful) == pytest.approx(math.log(2))


def test_what_is_packed_comes_back() -> None:
    decisions = [decision_of(RNG.normal(size=40).astype(np.float32), token, 10) for token in (0, 7, 39)]
    found = unpack(pack(decisions), 3)
    assert [one.token for one in found] == [0, 7, 39]
    assert [one.top.ids for one in found] == [one.top.ids for one in decisions]
    for one, other in zip(found, decisions, strict=True):
        assert one.log_prob == pytest.approx(other.log_prob, rel=1e-6)
        assert one.margin == pytest.approx(other.margin, abs=1e-6)
        assert divergence(other, one) < 1e-7
    assert unpack(pack([]), 0) == ()


@pytest.mark.parametrize("text", ["", "?", "AAAA", pack([decision_of(np.zeros(5), 1, 2)] * 2)])
def test_what_is_damaged_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="decisions"):
        unpack(text, 5)
