"""Metrics that compare an answer with its reference, in points from 0 to 100, one number per sample.

    rouge1, rouge2, rougeL, rougeLsum   F measure of common words, see rouge.py
    chrf                                F measure of character n-grams: sacrebleu's chrF2 of one sentence
    exact_match                         100 if both are equal except for case, punctuation and white space
    json_valid                          100 if the answer is JSON that matches the suite's `json_schema`

A metric is a line in `TEXT_METRICS`. Metrics of one function are computed together.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmserve.errors import Unsupported, raise_problems
from llmserve.evaluation.judging.rouge import METRICS as ROUGE
from llmserve.evaluation.judging.rouge import rouge_scores

Scores: TypeAlias = Mapping[str, NDArray[np.float64]]  # metric -> a number for each sample
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class TextRules:
    """A suite's settings for its metrics."""

    stemming: bool = True
    json_schema: Mapping[str, Any] | None = None  # None: any JSON


@dataclass(frozen=True, slots=True)
class TextMetric:
    title: str  # title in tables
    scores: Callable[[Sequence[str], Sequence[str], TextRules], Scores]  # of answers and their references
    package: str = ""  # the module that it imports
    is_binary: bool = False  # each sample has 0 or 100


def score_texts(names: Iterable[str], texts: Sequence[str], references: Sequence[str], rules: TextRules) -> Scores:
    """The metrics of these names, in this order. `Unsupported` if a package is missing."""
    names = list(names)
    require_packages(names)
    found: dict[str, NDArray[np.float64]] = {}
    for scores in dict.fromkeys(TEXT_METRICS[name].scores for name in names):
        found |= scores(texts, references, rules)
    return {name: found[name] for name in names}


def require_packages(names: Iterable[str]) -> None:
    """`Unsupported` unless the packages for these metrics are installed."""
    missing = {name: package for name in names if (package := TEXT_METRICS[name].package) and not find_spec(package)}
    problems = [f"{name} needs the package {package.replace('_', '-')}" for name, package in missing.items()]
    raise_problems(Unsupported, "metrics of this suite are not installed: pip install 'llmserve[eval]'", problems)


def schema_problem(schema: Mapping[str, Any]) -> str:
    """Why it is not a JSON schema; empty if it is one, or if it cannot be checked here."""
    if not find_spec("jsonschema"):
        return ""
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    try:
        validator_for(schema).check_schema(dict(schema))
    except SchemaError as error:
        return f"{'.'.join(map(str, error.path)) or 'the schema'}: {error.message}"
    return ""


def _rouge(texts: Sequence[str], references: Sequence[str], rules: TextRules) -> Scores:
    return rouge_scores(texts, references, stemming=rules.stemming)


def _chrf(texts: Sequence[str], references: Sequence[str], rules: TextRules) -> Scores:
    from sacrebleu.metrics.chrf import CHRF

    metric = CHRF()
    pairs = zip(texts, references, strict=True)
    return {"chrf": np.array([metric.sentence_score(text, [reference]).score for text, reference in pairs])}


def _exact_match(texts: Sequence[str], references: Sequence[str], rules: TextRules) -> Scores:
    pairs = zip(texts, references, strict=True)
    return {"exact_match": np.array([100.0 * (normalized(text) == normalized(other)) for text, other in pairs])}


def normalized(text: str) -> str:
    """As in lm-evaluation-harness's exact_match with `ignore_case` and `ignore_punctuation`, with single spaces."""
    return " ".join(text.lower().translate(_PUNCTUATION).split())


def _json_valid(texts: Sequence[str], references: Sequence[str], rules: TextRules) -> Scores:
    from jsonschema.validators import validator_for

    schema = rules.json_schema or {}
    validator = validator_for(schema)(schema)

    def is_valid(text: str) -> bool:
        try:
            return bool(validator.is_valid(json.loads(text, parse_constant=_refuse)))
        except (ValueError, RecursionError):
            return False

    return {"json_valid": np.array([100.0 * is_valid(text) for text in texts])}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is valid in Python, but not in JSON")


TEXT_METRICS: Mapping[str, TextMetric] = {
    **{name: TextMetric(f"ROUGE-{name.removeprefix('rouge')}", _rouge, "rouge_score") for name in ROUGE},
    "chrf": TextMetric("chrF", _chrf, "sacrebleu"),
    "exact_match": TextMetric("exact", _exact_match, is_binary=True),
    "json_valid": TextMetric("valid JSON", _json_valid, "jsonschema", is_binary=True),
}
DEFAULT_METRICS = ROUGE
