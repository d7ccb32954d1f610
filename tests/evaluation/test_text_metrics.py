"""Beside the package itself: sacrebleu; rouge-score is in test_statistics.py, lm-evaluation-harness in tests/e2e."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
import sacrebleu

from llmserve.errors import Unsupported
from llmserve.evaluation.judging import text_metrics
from llmserve.evaluation.judging.text_metrics import (
    TEXT_METRICS,
    TextRules,
    require_packages,
    schema_problem,
    score_texts,
)

TEXTS = ["Returns the opened files.", "read a line", "", "Die Katze saß — müde.", "读取一行。", "The SAME, thing!"]
REFERENCES = [
    "Return an open file.",
    "Read one line.",
    "Nothing.",
    "Eine Katze saß.",
    "读取文件的一行。",
    "the same thing",
]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def points(name: str, texts: list[str], references: list[str] | None = None, **rules: object) -> list[float]:
    found = score_texts([name], texts, references or texts, TextRules(**rules))  # type: ignore[arg-type]
    return [float(value) for value in found[name]]


def test_chrf_is_sacrebleus() -> None:
    expected = [sacrebleu.sentence_chrf(text, [ref]).score for text, ref in zip(TEXTS, REFERENCES, strict=True)]
    assert points("chrf", TEXTS, REFERENCES) == expected
    assert points("chrf", ["the same"]) == [100.0]
    assert 0 < expected[4] < 100  # of Chinese, too


def test_exact_match_looks_at_words_only() -> None:
    assert points("exact_match", TEXTS, REFERENCES)[-1] == 100.0
    assert points("exact_match", [" a  b\n"], ["A b."]) == [100.0]  # white space is no difference


def test_json_is_what_a_parser_takes() -> None:
    good = ['{"a": 1}', " [1, 2]\n", '"text"', "null"]
    bad = ["", "{'a': 1}", '{"a": 1', '```json\n{"a": 1}\n```', "NaN", '{"a": Infinity}', "[" * 100_000]
    assert points("json_valid", good) == [100.0] * len(good)
    assert points("json_valid", bad) == [0.0] * len(bad)


def test_json_follows_the_schema() -> None:
    texts = [json.dumps(value) for value in ({"n": 1}, {"n": "1"}, {}, [1])]
    assert points("json_valid", texts, json_schema=SCHEMA) == [100.0, 0.0, 0.0, 0.0]
    assert points("json_valid", texts) == [100.0] * 4


def test_metrics_come_in_the_order_of_their_names_and_those_of_one_function_together() -> None:
    found = score_texts(["exact_match", "rougeL", "rouge1"], TEXTS, REFERENCES, TextRules())
    assert list(found) == ["exact_match", "rougeL", "rouge1"]
    assert all(values.dtype == np.float64 and values.shape == (len(TEXTS),) for values in found.values())
    everything = score_texts(TEXT_METRICS, TEXTS, REFERENCES, TextRules())
    assert all((values >= 0).all() and (values <= 100).all() for values in everything.values())


def test_all_missing_packages_are_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_metrics, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"(?s)llmserve\[eval\].*chrf needs the package sacrebleu.*rouge-score"):
        require_packages(["exact_match", "chrf", "rouge1"])
    require_packages(["exact_match"])
    assert importlib.util.find_spec("sacrebleu")


def test_a_schema_that_is_none_is_explained() -> None:
    assert schema_problem(SCHEMA) == ""
    assert "'wrong' is not valid" in schema_problem({"properties": {"a": {"type": "wrong"}}})
