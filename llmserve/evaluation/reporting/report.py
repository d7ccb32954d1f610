"""The result of an evaluation as one JSON document, with every sample, so that failures can be examined."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.errors import InvalidArgument
from llmserve.evaluation.answers import Answer, Performance, Sample
from llmserve.evaluation.judging.evidence import Evidence
from llmserve.evaluation.judging.gate import GateResult, LossResult, MetricResult
from llmserve.evaluation.judging.parity import Parity
from llmserve.evaluation.judging.power import Flips
from llmserve.evaluation.judging.text_metrics import Scores
from llmserve.evaluation.served.judging import ServedPart

STORED = "stored"  # the source of a baseline from another run begins with this
FORMAT = 3


@dataclass(frozen=True, slots=True)
class Side:
    """One side of the comparison: description, answers and speed."""

    facts: Mapping[str, str]  # name, digest, dtype, machine ...
    answers: Sequence[Answer]
    performance: Performance


@dataclass(frozen=True, slots=True)
class Report:
    suite: str
    suite_digest: str
    rules: Mapping[str, Any]  # the suite's rules: `Suite.rules`
    samples: Sequence[Sample]
    baseline: Side
    engine: Side
    scores: tuple[Scores, Scores]  # from the baseline, and from the engine
    gate: GateResult
    evidence: Evidence | str  # or why there is no evidence
    parity: Parity
    passed: bool  # the gate's verdict, after the suite's rule for inconclusive ones
    versions: Mapping[str, str]
    served: ServedPart | None = None  # None: the engine as served was not checked

    @property
    def is_complete(self) -> bool:
        """Whether every sample of the suite was answered."""
        return bool(len(self.samples) == self.rules["num_samples"])

    @property
    def may_compare_times(self) -> bool:
        """Whether both sides ran in this run, with the same number of requests in flight."""
        baseline, engine = self.baseline.facts, self.engine.facts
        return not baseline["source"].startswith(STORED) and baseline["in_flight"] == engine["in_flight"]

    @property
    def suite_facts(self) -> dict[str, Any]:
        return {
            "name": self.suite, "digest": self.suite_digest, "rules": dict(self.rules),
            "num_samples": len(self.samples), "complete": self.is_complete,
        }  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "passed": self.passed,
            "verdict": self.gate.verdict.value,
            "reasons": self.gate.reasons,
            "suite": self.suite_facts,
            "baseline": side_facts(self.baseline),
            "engine": side_facts(self.engine),
            "metrics": self.metric_facts(),
            "evidence": self.evidence_facts(),
            "parity": {
                "exact_match_rate": self.parity.exact_match_rate,
                "largest_margin": self.parity.largest_margin,
                "divergences": [
                    {"id": d.sample_id, "position": d.position, "margin": d.margin} for d in self.parity.divergences
                ],
            },
            **({} if self.served is None else self.served.documents()),
            "versions": dict(self.versions),
            "samples": [self._sample(index) for index in range(len(self.samples))],
        }

    def save(self, path: Path) -> None:
        write_report(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    def metric_facts(self) -> dict[str, Any]:
        return {metric.metric: _metric(metric) for metric in self.gate.metrics}

    def evidence_facts(self) -> dict[str, Any]:
        losses = {result.loss.value: _loss(result) for result in self.gate.losses}
        if isinstance(self.evidence, str):
            return {"not_measured": self.evidence, "losses": losses}
        return {
            "positions": self.evidence.num_positions,
            "losses": losses,
            "kl_of_samples": [round(value, 6) for value in self.evidence.by_sample()],
        }

    def _sample(self, index: int) -> dict[str, Any]:
        sample = self.samples[index]
        return {
            "id": sample.id,
            "reference": sample.reference,
            **({"choices": list(sample.choices)} if sample.choices else {}),
            "baseline": _answer(self.baseline.answers[index], self.scores[0], index),
            "engine": _answer(self.engine.answers[index], self.scores[1], index),
        }


def write_report(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"the report cannot be written to {path}: {error.strerror}") from error


def side_facts(side: Side) -> dict[str, Any]:
    performance = side.performance
    return (
        dict(side.facts)
        | {
            "latency_seconds": {"mean": performance.mean, "p50": performance.p50, "p95": performance.p95},
            "tokens_per_second": performance.tokens_per_second,
        }
        | ({"drafts": _drafts(performance)} if performance.num_drafted else {})
    )


def _drafts(performance: Performance) -> dict[str, int]:
    return {"drafted_tokens": performance.num_drafted, "accepted_tokens": performance.num_accepted}


def _metric(metric: MetricResult) -> dict[str, Any]:
    return {
        "baseline": metric.baseline,
        "engine": metric.engine,
        "difference": metric.difference.mean,
        "low": metric.difference.low,
        "high": metric.difference.high,
        "margin": metric.margin,
        "floor": metric.floor,
        "verdict": metric.verdict.value,
        "detectable": metric.detectable,
    } | ({"flips": flips_facts(metric.flips)} if metric.flips else {})


def flips_facts(flips: Flips) -> dict[str, Any]:
    return {"lost": flips.lost, "gained": flips.gained, "p_value": flips.p_value}


def _loss(result: LossResult) -> dict[str, Any]:
    return {
        "value": result.interval.mean,
        "low": result.interval.low,
        "high": result.interval.high,
        "margin": result.margin,
        "verdict": result.verdict.value,
        "detectable": result.detectable,
    }


def _answer(answer: Answer, scores: Scores, index: int) -> dict[str, Any]:
    return {
        "text": answer.text,
        "token_ids": list(answer.token_ids) if answer.token_ids is not None else None,
        "num_prompt_tokens": answer.num_prompt_tokens,
        "num_tokens": answer.num_tokens,
        "seconds": answer.seconds,
        "scores": {name: float(values[index]) for name, values in scores.items()},
    } | ({"log_likelihoods": list(answer.log_likelihoods)} if answer.log_likelihoods else {})
