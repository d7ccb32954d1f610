"""Scores of one side's answers, by a suite's metrics."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.evaluation.answers import Answer, Sample
from llmserve.evaluation.choices import score_choices
from llmserve.evaluation.judging.text_metrics import Scores, require_packages, score_texts
from llmserve.evaluation.suite import Suite


def require_metrics(suite: Suite) -> None:
    """`Unsupported` unless the suite's metrics can be computed here."""
    if not suite.choices_column:
        require_packages(suite.metrics)


def scores_of(suite: Suite, samples: Sequence[Sample], answers: Sequence[Answer]) -> Scores:
    """A number from 0 to 100 for each sample, by metric."""
    if suite.choices_column:
        found = score_choices(samples, answers)
        return {name: found[name] for name in suite.metrics}
    texts, references = [answer.text for answer in answers], [sample.reference for sample in samples]
    return score_texts(suite.metrics, texts, references, suite.text_rules)
