"""Margins that are a multiple of what sound rounding costs the same network."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmserve.core import TopTokens
from llmserve.evaluation.answers import Answer
from llmserve.evaluation.decisions import Decision
from llmserve.evaluation.judging.rounding import LEAST, loss_margins
from llmserve.evaluation.suite import Suite, load_suite
from tests.evaluation.suites import write_suite

DECISION = Decision(1, -0.5, TopTokens((1, 2), (-0.5, -1.25)))
HALF = {"dtype": "float16"}
INT8 = {"dtype": "float16+int8", "precision": "int8", "rounding_loss": "0.0003"}


def answers(*rounding: float, num_decisions: int | None = None) -> list[Answer]:
    decisions = (DECISION,) * (len(rounding) if num_decisions is None else num_decisions)
    return [Answer("a", 3, len(decisions), 0.1, decisions=decisions, rounding=rounding)]


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    losses = {"float": {"kl": 0.5, "flip": 0.1}, "int8": {"kl": 0.5, "kl_p99": 0.01}}
    return load_suite(write_suite(tmp_path, loss_margins=losses, rounding_margins={"float": 4, "int8": 2}))


def test_a_float_engine_may_lose_a_multiple_of_what_its_dtype_costs(suite: Suite) -> None:
    margins, said = loss_margins(suite, HALF, answers(1e-6, 3e-6), HALF)
    assert margins == {"kl": pytest.approx(8e-6), "kl_p99": pytest.approx(12e-6), "flip": 0.1}
    assert said == "kl 2e-06, kl_p99 3e-06 in float16; at most 4 times that"
    exact = {"dtype": "float32"}
    assert loss_margins(suite, HALF, answers(1e-6, 3e-6), exact)[0] == margins
    assert loss_margins(suite, exact, answers(1e-6, 3e-6), HALF) == (margins, said)


def test_quantized_weights_cost_what_the_build_has_measured(suite: Suite) -> None:
    margins, said = loss_margins(suite, HALF, answers(1e-6, 3e-6), INT8)
    assert margins == {"kl": pytest.approx(2 * (0.0003 + 2e-6)), "kl_p99": 0.01}
    assert said == "kl 0.0003 in int8; at most 2 times that"


def test_the_suites_own_margin_is_never_exceeded(suite: Suite) -> None:
    assert loss_margins(suite, HALF, answers(1.0, 2.0), HALF)[0] == {"kl": 0.5, "kl_p99": 8.0, "flip": 0.1}


def test_rounding_that_costs_nothing_leaves_room_for_single_precision(suite: Suite) -> None:
    assert loss_margins(suite, HALF, answers(0.0, 0.0), HALF)[0]["kl"] == 4 * LEAST


@pytest.mark.parametrize(
    ("told", "baseline", "engine"),
    [
        (answers(num_decisions=2), HALF, HALF),  # a baseline from before
        (answers(1e-6, float("nan")), HALF, HALF),  # a network that overflows in float16
        (answers(1e-6, 3e-6), HALF, {"dtype": "bfloat16"}),
        (answers(1e-6, 3e-6), HALF, {}),  # a server that does not tell
        (answers(1e-6, 3e-6), HALF, {**INT8, "rounding_loss": None}),
    ],
)
def test_where_the_cost_is_not_known_the_suites_own_margins_count(
    suite: Suite, told: list[Answer], baseline: dict[str, str], engine: dict[str, str]
) -> None:
    facts = {name: value for name, value in engine.items() if value is not None}
    margins, said = loss_margins(suite, baseline, told, facts)
    assert margins == suite.loss_margins[engine.get("precision", "float")]
    assert "not known" in said


def test_a_suite_that_does_not_ask_has_its_own_margins(tmp_path: Path) -> None:
    suite = load_suite(write_suite(tmp_path, loss_margins={"float": {"kl": 0.5}}))
    assert loss_margins(suite, HALF, answers(1e-6), HALF) == ({"kl": 0.5}, "")
