"""Rules as a config or a client gives them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import InvalidArgument
from llmserve.serving.config.model_config import config_problems
from llmserve.serving.config.rollout_rules import (
    PARAMETER,
    RolloutRules,
    described,
    make_rules,
    parse_share,
    rollout_problems,
    rules_of,
)


def config(text: str | None) -> ModelConfig:
    made = ModelConfig(name="m")
    if text is not None:
        made.parameters[PARAMETER].string_value = text
    return made


def test_a_config_without_rules_has_none() -> None:
    assert rules_of(config(None)) is None
    assert rollout_problems(config(None)) == []


def test_what_is_not_said_is_the_default() -> None:
    assert rules_of(config("{}")) == rules_of(config("")) == RolloutRules()
    assert RolloutRules().steps == (0.0, 0.05, 0.25)


def test_every_rule_can_be_given() -> None:
    given = {
        "shadow": "20%", "canary": ["1%", 0.5, "100%"], "requests": 7, "seconds": 0, "max_error_rate": "2%",
        "min_agreement": 1, "max_latency_ratio": 1.5, "timeout_s": 5, "promote": "by_hand",
    }  # fmt: skip
    made = rules_of(config(json.dumps(given)))
    assert made == RolloutRules(0.2, (0.01, 0.5, 1.0), 7, 0.0, 0.02, 1.0, 1.5, 5.0, "by_hand")
    assert made.steps == (0.0, 0.01, 0.5, 1.0)
    assert make_rules(described(made)) == made


def test_without_copies_there_is_nothing_to_compare() -> None:
    made = make_rules({"shadow": 0})
    assert made.min_agreement is None
    assert made.steps == (0.05, 0.25)
    with pytest.raises(InvalidArgument, match="min_agreement needs a shadow share"):
        make_rules({"shadow": 0, "min_agreement": 0.5})


def test_judgements_can_be_left_out() -> None:
    made = make_rules({"min_agreement": None, "max_latency_ratio": None})
    assert (made.min_agreement, made.max_latency_ratio) == (None, None)


def test_without_canary_requests_nothing_tells_how_fast_it_is() -> None:
    made = make_rules({"canary": []})
    assert (made.max_latency_ratio, made.steps) == (None, (0.0,))
    with pytest.raises(InvalidArgument, match="max_latency_ratio needs canary shares"):
        make_rules({"canary": [], "max_latency_ratio": 2})


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"shadow": "110%"}, "shadow must be a share"),
        ({"shadow": True}, "shadow must be a share"),
        ({"canary": "5%"}, "canary must be a list of shares"),
        ({"canary": ["25%", "5%"]}, "canary shares must rise"),
        ({"canary": [0]}, "a canary share must be above 0"),
        ({"shadow": 0, "canary": []}, "nothing would reach the candidate"),
        ({"requests": 0}, "requests must be an integer of at least 1"),
        ({"requests": 2.5}, "requests must be an integer"),
        ({"seconds": "60"}, "seconds must be a number"),
        ({"seconds": float("nan")}, "seconds must be a number"),
        ({"max_latency_ratio": 0.5}, "max_latency_ratio must be a number of at least 1"),
        ({"promote": "soon"}, "promote must be automatic or by_hand"),
        ({"shares": 1}, "unknown rule 'shares'; known: shadow, canary"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgument, match="the rules of a rollout") as caught:
        make_rules(given)
    assert problem in str(caught.value)


def test_all_problems_are_told_at_once_and_keep_the_model_from_being_loaded() -> None:
    wrong = config('{"shadow": 2, "canary": 1, "hello": 1}')
    (problem,) = rollout_problems(wrong)
    assert "3 problems" in problem
    assert problem in config_problems(wrong)
    assert "is not JSON" in rollout_problems(config("{"))[0]
    assert "must be a JSON object" in rollout_problems(config("[1]"))[0]


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.5", 0.5), (1, 1.0), ("100 %", 1.0), (0, 0.0)])
def test_shares(text: object, share: float) -> None:
    assert parse_share(text) == share
