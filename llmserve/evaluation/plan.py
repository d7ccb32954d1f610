"""Plans a run: how many samples a suite's margins need, and which losses its own samples can detect.

That depends on how far one sample's scores differ between engine and baseline (power.py has the formula). An earlier
report of the suite has this number. A stored baseline gives a bound: independent answers of the same quality differ by
the baseline's own standard deviation times the root of 2; a real engine's answers differ far less.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.checkpoint.adapters.adapted import open_checkpoint
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.errors import InvalidArgument, NotFound, raise_problems
from llmserve.evaluation.baseline.folder import text_folder
from llmserve.evaluation.baseline.stored import BaselineKey, load_baseline
from llmserve.evaluation.data import load_samples, suite_digest
from llmserve.evaluation.judging.evidence import Loss
from llmserve.evaluation.judging.gate import MIN_SAMPLES
from llmserve.evaluation.judging.power import detectable, deviation_of, samples_needed, spread
from llmserve.evaluation.judging.scoring import require_metrics, scores_of
from llmserve.evaluation.judging.statistics import Interval
from llmserve.evaluation.judging.text_metrics import Scores
from llmserve.evaluation.prompts import PromptEncoder, text_digest
from llmserve.evaluation.run import EvalOptions, usual_dtype
from llmserve.evaluation.suite import Suite, load_suite
from llmserve.models.number_formats import UNROUNDED


@dataclass(frozen=True, slots=True)
class PlannedMargin:
    """What one margin of the suite requires."""

    name: str  # margin of a metric, or of a loss
    margin: float
    deviation: float  # standard deviation of one sample's difference
    detectable: float  # minimum detectable effect of the suite's samples
    needed: int | None  # samples; None: no number is sufficient


@dataclass(frozen=True, slots=True)
class Plan:
    suite: str
    num_samples: int
    source: str  # source of the deviations, as text
    margins: tuple[PlannedMargin, ...]

    @property
    def too_few(self) -> tuple[PlannedMargin, ...]:
        return tuple(each for each in self.margins if each.needed is None or each.needed > self.num_samples)


def plan(options: EvalOptions, earlier: Path | None = None) -> Plan:
    """Use an earlier report's spread, or the stored baseline's bound. Runs no network."""
    problems = options.value_problems()
    if options.checkpoint is None and earlier is None:
        problems.append("a plan needs --earlier REPORT, or --hf-model-dir with a stored baseline")
    raise_problems(InvalidArgument, "eval --plan", problems)
    suite = load_suite(options.suite)
    num_samples = options.num_samples or suite.num_samples
    if earlier is not None:
        report = _read_report(earlier, suite)
        margins = (*_of_metrics(suite, report, num_samples), *_of_losses(suite, report, num_samples))
        source = f"the differences of {len(report['samples'])} samples in {earlier}"
    else:
        scores = _stored_scores(options, suite)
        margins = tuple(
            _planned(name, margin, math.sqrt(2) * spread(scores[name]), num_samples, worst=float(scores[name].mean()))
            for name, margin in suite.margins.items()
        )
        source = (
            "the stored baseline, as if the engine's answers were independent of it; --earlier REPORT is more precise"
        )
    if not margins:
        raise InvalidArgument(
            f"nothing to plan: suite {suite.name} has no margins that can be planned"
            + ("" if earlier else "; to plan loss_margins, give a report: --earlier REPORT")
        )
    return Plan(suite.name, num_samples, source, margins)


def _planned(
    name: str, margin: float, deviation: float, num_samples: int, *, known: float = 0.0, worst: float = 0.0
) -> PlannedMargin:
    """`known`: the measured loss, which reduces the margin; `worst`: the most that one answer can lose."""
    needed = samples_needed(deviation, margin - known, worst=worst)
    return PlannedMargin(
        name,
        margin,
        deviation,
        detectable(deviation, num_samples, worst=worst),
        None if needed is None else max(needed, MIN_SAMPLES),
    )


def _read_report(path: Path, suite: Suite) -> Mapping[str, Any]:
    try:
        report: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        digest, num_samples, _ = report["suite"]["digest"], len(report["samples"]), report["engine"]["name"]
    except OSError as error:
        raise NotFound(f"report {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"{path} is not a report of llmserve eval ({error!r})") from error
    if digest != suite_digest(suite):
        raise InvalidArgument(f"{path} is from another suite than {suite.name}, or from other data or prompts")
    if num_samples < MIN_SAMPLES:
        raise InvalidArgument(
            f"{path} has {num_samples} samples; at least {MIN_SAMPLES} are needed to estimate the spread"
        )
    return report


def _of_metrics(suite: Suite, report: Mapping[str, Any], num_samples: int) -> Iterator[PlannedMargin]:
    for name, margin in suite.margins.items():
        try:
            scores = [[sample[side]["scores"][name] for side in ("baseline", "engine")] for sample in report["samples"]]
        except KeyError as error:
            raise InvalidArgument(f"the earlier report lacks {error}; create it again") from error
        baseline, engine = np.array(scores, np.float64).T
        yield _planned(name, margin, spread(engine - baseline), num_samples, worst=float(baseline.mean()))


def _of_losses(suite: Suite, report: Mapping[str, Any], num_samples: int) -> Iterator[PlannedMargin]:
    losses = report.get("evidence", {}).get("losses", {})
    margins = suite.loss_margins.get(report["engine"].get("precision", UNROUNDED), {})
    for name, margin in margins.items():
        if name in losses and name != Loss.FLIP.value and "not_measured" not in report["evidence"]:
            found = losses[name]
            interval = Interval(found["value"], found["low"], found["high"])
            deviation = deviation_of(interval, len(report["samples"]))
            margin = min(margin, found.get("margin") or margin)  # the cost of rounding, if the report has it
            yield _planned(name, margin, deviation, num_samples, known=interval.mean)


def _stored_scores(options: EvalOptions, suite: Suite) -> Scores:
    """Scores of the stored baseline's answers."""
    assert options.checkpoint is not None, "checked before"
    require_metrics(suite)
    directory = EngineDirectory.open(options.engine) if options.engine else None
    with open_checkpoint(options.checkpoint, options.lora) as checkpoint, text_folder(checkpoint) as texts:
        encoder = PromptEncoder(texts, suite.max_tokens)
        samples = load_samples(suite, options.num_samples or suite.num_samples, encoder.count_ids)
        dtype = options.dtype or usual_dtype(checkpoint, directory)
        key = BaselineKey(checkpoint.digest(), text_digest(texts), suite_digest(suite), dtype)
        prompts = encoder.encode_samples(samples)
    stored = load_baseline(suite.baselines, key)
    answers = stored.select(prompts) if stored else None
    if answers is None:
        raise NotFound(
            f"no {dtype} baseline of these samples is stored in {suite.baselines}; run the suite once without --plan, "
            "choose another dtype with --dtype, or give a report with --earlier REPORT"
        )
    return scores_of(suite, samples, answers)
