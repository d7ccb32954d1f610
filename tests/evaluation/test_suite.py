from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmserve.errors import InvalidArgument, NotFound
from llmserve.evaluation.suite import load_suite
from llmserve.stages.chat import Message
from llmserve.stages.guides import GuideKind
from tests.evaluation.suites import write_choice_suite, write_suite

SUITES = Path(__file__).resolve().parents[2] / "eval" / "suites"


def test_every_key_arrives(tmp_path: Path) -> None:
    suite = load_suite(
        write_suite(
            tmp_path,
            floors={"rouge1": 15},
            stemming=False,
            inconclusive="pass",
            max_input_tokens=90,
            loss_margins={"float": {"kl": 0.001, "flip": 0.1}},
        )
    )
    assert suite.name == "tiny"
    assert suite.data.path == tmp_path / "rows.jsonl"
    assert (suite.reference_column, suite.id_column) == ("summary", "id")
    assert suite.prompt == (Message("user", "Summarize:\n{document}"),)
    assert suite.prompt_columns == ["document"]
    assert (suite.num_samples, suite.max_tokens, suite.max_input_tokens) == (32, 8, 90)
    assert (suite.margins, suite.floors) == ({"rougeL": 10.0}, {"rouge1": 15.0})
    assert (suite.stemming, suite.inconclusive_passes) == (False, True)
    assert suite.baselines == tmp_path / "baselines"
    assert suite.loss_margins == {"float": {"kl": 0.001, "flip": 0.1}}


def test_metrics_are_those_that_are_asked_for_and_those_that_are_judged(tmp_path: Path) -> None:
    rouge = ("rouge1", "rouge2", "rougeL", "rougeLsum")
    assert load_suite(write_suite(tmp_path)).metrics == rouge
    assert load_suite(write_suite(tmp_path, margins={"chrf": 1})).metrics == (*rouge, "chrf")
    suite = load_suite(write_suite(tmp_path, metrics=["exact_match", "chrf"], floors={"json_valid": 90}))
    assert suite.metrics == ("rougeL", "chrf", "exact_match", "json_valid")


def test_structured_output_is_held_to_the_schema(tmp_path: Path) -> None:
    plain = load_suite(write_suite(tmp_path))
    assert plain.guide is None
    assert plain.rules().keys() == {
        "data", "columns", "prompt", "max_tokens", "max_input_tokens", "margins", "loss_margins", "evidence", "floors",
        "num_samples", "stemming", "inconclusive",
    }  # fmt: skip
    schema = {"type": "object", "required": ["n"]}
    suite = load_suite(write_suite(tmp_path, json_schema=schema, structured_output=True))
    assert suite.guide is not None
    assert (suite.guide.kind, json.loads(suite.guide.text)) == (GuideKind.JSON_SCHEMA, schema)
    assert suite.text_rules.json_schema == suite.rules()["json_schema"] == schema
    assert suite.rules()["structured_output"] is True
    any_object = load_suite(write_suite(tmp_path, structured_output=True)).guide
    assert any_object is not None
    assert any_object.kind is GuideKind.JSON


def test_a_suite_of_choices_has_metrics_of_its_own(tmp_path: Path) -> None:
    suite = load_suite(write_choice_suite(tmp_path))
    assert suite.choices_column == "choices"
    assert suite.metrics == ("acc", "acc_norm", "acc_bytes")
    assert suite.rules()["columns"]["choices"] == "choices"
    with pytest.raises(InvalidArgument) as caught:
        load_suite(
            write_choice_suite(tmp_path, max_tokens=8, stemming=False, margins={"rougeL": 1}, evidence="optional")
        )
    for part in (
        "max_tokens has no effect", "stemming has no effect", "evidence has no effect", "unknown key: margins.rougeL"
    ):  # fmt: skip
        assert part in str(caught.value)
    with pytest.raises(InvalidArgument, match=r"unknown key: margins\.acc"):
        load_suite(write_suite(tmp_path, margins={"acc": 1}))


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    path = write_suite(
        tmp_path,
        name=3,
        max_token=5,
        max_tokens=0,
        margins={"rougeL": -1, "bleu": 2},
        data={"path": "a.txt", "hub": "b/c"},
        columns={"id": "id"},
        stemming="yes",
        inconclusive="maybe",
        prompt="{document}",
    )
    with pytest.raises(InvalidArgument) as caught:
        load_suite(path)
    for part in (
        "unknown key: max_token ", "name must be", "max_tokens must be", "margins.rougeL", "unknown key: margins.bleu",
        "either path", "columns.reference", "stemming must be", "inconclusive must be", "either prompt",
    ):  # fmt: skip
        assert part in str(caught.value)


@pytest.mark.parametrize("key", ["name", "data", "columns", "num_samples", "max_tokens"])
def test_required_keys(tmp_path: Path, key: str) -> None:
    with pytest.raises(InvalidArgument, match=f"missing key: {key}"):
        load_suite(write_suite(tmp_path, **{key: None}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": None, "prompt": "no column"}, "names no column"),
        ({"messages": None, "prompt": "{document.__class__}"}, "may only refer to columns"),
        ({"messages": None, "prompt": "{document!r}"}, "may only refer to columns"),
        ({"messages": None, "prompt": "{document"}, "malformed"),
        ({"name": "../../reports"}, "name must not contain '/'"),
        ({"messages": None, "prompt": "{}"}, "may only refer to columns"),
        ({"messages": [{"role": "user"}]}, "messages must be a list"),
        ({"messages": []}, "messages must be a list"),
        ({"data": {"path": "rows.xlsx"}}, "must end in"),
        ({"data": {"hub": "a/b", "config": 3.0}}, "put it in quotes"),
        ({"margins": None}, "has no criterion; give margins, loss_margins, rounding_margins or floors"),
        ({"margins": {}, "floors": {}}, "has no criterion"),
        ({"rounding_margins": {"int3": 2, "float": 0.5}}, "unknown key: rounding_margins.int3"),
        ({"rounding_margins": {"float": 0.5}}, "rounding_margins.float must be a number of at least 1, got 0.5"),
        ({"loss_margins": {"int3": {"kl": 1}}}, "unknown key: loss_margins.int3"),
        ({"loss_margins": {"int8": {"rougeL": 1}}}, "unknown key: loss_margins.int8.rougeL"),
        ({"loss_margins": {"int8": 0.5}}, "loss_margins.int8 must be a mapping of losses"),
        ({"loss_margins": {"int8": {"kl": -1}}}, "loss_margins.int8.kl must be a number of at least 0"),
        ({"evidence": "maybe"}, "evidence must be required or optional"),
        ({"as_served": "no"}, "as_served must be optional or required"),
        ({"speed_margins": {"warmth": 2}}, "unknown key: speed_margins.warmth"),
        ({"speed_margins": {"ttft": 0.9}}, "speed_margins.ttft must be a number of at least 1, got 0.9"),
        ({"num_samples": True}, "num_samples must be an integer"),
        ({"metrics": ["bleu"]}, "unknown metric: bleu .known: rouge1"),
        ({"metrics": []}, "metrics must name at least one"),
        ({"metrics": "chrf"}, "metrics must be a list"),
        ({"json_schema": {"type": "wrong"}}, "json_schema is not a JSON schema: type: 'wrong' is not"),
        ({"json_schema": 3}, "json_schema must be a dict"),
        ({"structured_output": "yes"}, "structured_output must be a bool"),
        ({"columns": {"reference": "summary", "choices": 3}}, "columns.choices must name"),
    ],
)
def test_bad_values_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        load_suite(write_suite(tmp_path, **changes))


def test_what_a_suite_asks_of_the_engine_as_it_is_served_is_a_rule_of_its_own(tmp_path: Path) -> None:
    """Blessings of suites that ask for nothing stay what they are."""
    plain = load_suite(write_suite(tmp_path / "plain"))
    asking = load_suite(write_suite(tmp_path / "asking", as_served="required", speed_margins={"ttft": 1.5}))
    assert not plain.needs_served
    assert asking.needs_served
    assert asking.rules() == plain.rules() | {"as_served": "required", "speed_margins": {"ttft": 1.5}}


def test_not_a_suite(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="eval/suites"):
        load_suite(tmp_path / "nothing.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(InvalidArgument, match="must be a mapping"):
        load_suite(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    with pytest.raises(InvalidArgument, match="not valid YAML"):
        load_suite(tmp_path / "broken.yaml")
    (tmp_path / "twice.yaml").write_text("name: a\nmargins: {rougeL: 1}\nmargins: {rougeL: 50}\n")
    with pytest.raises(InvalidArgument, match="duplicate key 'margins'"):
        load_suite(tmp_path / "twice.yaml")


@pytest.mark.parametrize("path", sorted(SUITES.glob("*.yaml")), ids=lambda path: path.stem)
def test_suites_of_the_project_load(path: Path) -> None:
    suite = load_suite(path)
    assert suite.name == path.stem
    assert suite.margins or suite.structured_output  # the baseline is held to nothing, so a floor judges
    assert suite.baselines.resolve() == SUITES.parent / "baselines"
