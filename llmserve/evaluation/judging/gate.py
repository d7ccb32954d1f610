"""The release decision: may this engine replace the baseline, as far as these samples can tell?

Per metric, with the engine's loss margin m and the 95 % interval [low, high] of the mean difference engine - baseline:

    low >= -m                 pass            shown to lose at most m
    high < -m                 fail            shown to lose more than m
    otherwise                 inconclusive    too few samples, or too noisy, to say

A metric below its floor fails outright. Nothing passes with fewer than MIN_SAMPLES samples, or if the baseline scores
at most m, because no engine could lose more. A floor of 0 does not pass if the engine scores 0. And nothing passes if
one more worthless answer would prevent that: the interval is based only on observed losses, and rare losses are mostly
not observed. The gate's verdict is the worst one; the suite decides which exit code an inconclusive gate has.

A loss of the evidence (`evidence.Loss`) has the same three verdicts, with its interval on the other side of its margin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmserve.evaluation.choices import CHOICE_METRICS
from llmserve.evaluation.judging.evidence import Evidence, Loss
from llmserve.evaluation.judging.power import Flips, detectable, detectable_of, samples_needed, spread
from llmserve.evaluation.judging.statistics import Interval, paired_bootstrap
from llmserve.evaluation.judging.text_metrics import TEXT_METRICS, Scores

# The interval is based only on observed losses: if an engine spoils one answer in ten, n samples show no loss with
# probability 0.9^n. That is 12 % for 20 samples, and 4 % for 30: less than the 5 % of the interval.
MIN_SAMPLES = 30
BINARY = frozenset((*CHOICE_METRICS, *(name for name, metric in TEXT_METRICS.items() if metric.is_binary)))
ROUNDING = 1e-9  # points; smaller differences are arithmetic, not quality


class Verdict(Enum):
    PASS = "pass"
    INCONCLUSIVE = "inconclusive"
    FAIL = "fail"


SEVERITY = (Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.FAIL)
NO_CRITERION = (
    "no criterion of the suite applies to this engine: add margins, floors, or loss_margins for its precision"
)


@dataclass(frozen=True, slots=True)
class MetricResult:
    """One metric: means of 0 to 100, the difference with its interval, and its criteria."""

    metric: str
    baseline: float
    engine: float
    difference: Interval
    margin: float | None  # None: reported, not judged
    floor: float | None
    verdict: Verdict
    doubt: str = ""  # why an apparent pass is inconclusive
    detectable: float = 0.0  # minimum detectable effect, in points
    flips: Flips | None = None  # for a metric that is right or wrong

    @property
    def is_judged(self) -> bool:
        return self.margin is not None or self.floor is not None

    @property
    def reason(self) -> str:
        """Why this verdict, as text."""
        if self.floor is not None and self.engine < self.floor:
            return f"{self.metric} {self.engine:.2f} is below the floor of {self.floor:g}"
        if self.doubt:
            return f"{self.metric}: {self.doubt}"
        if self.margin is None:
            asked = "is not judged" if self.floor is None else f"reaches the floor of {self.floor:g}"
            return f"{self.metric} {self.engine:.2f} {asked}"
        low, high = self.difference.low, self.difference.high
        interval = f"{self.difference.mean:+.2f}, 95 % interval {low:+.2f} to {high:+.2f}"
        words = {
            Verdict.PASS: "the engine loses at most",
            Verdict.FAIL: "the engine loses more than",
            Verdict.INCONCLUSIVE: "these samples cannot tell whether the engine loses at most",
        }
        return f"{self.metric}: {words[self.verdict]} {self.margin:g} ({interval})"


@dataclass(frozen=True, slots=True)
class LossResult:
    """One loss, and its criteria. An interval without width means a single number."""

    loss: Loss
    interval: Interval
    margin: float | None  # None: reported, not judged
    verdict: Verdict
    doubt: str = ""  # why it does not pass, regardless of the interval

    @property
    def reason(self) -> str:
        """Why this verdict, as text."""
        name, value = self.loss.value, f"{self.interval.mean:.3g}"
        if self.interval.high > self.interval.low:
            value += f", 95 % interval {self.interval.low:.3g} to {self.interval.high:.3g}"
        if self.doubt:
            return f"{name}: {self.doubt}"
        if self.margin is None:
            return f"{name} ({value}) is not judged"
        words = {
            Verdict.PASS: "is at most",
            Verdict.FAIL: "is more than",
            Verdict.INCONCLUSIVE: "these samples cannot tell whether it is at most",
        }
        return f"{name}: {words[self.verdict]} {self.margin:.3g} ({value})"

    @property
    def is_judged(self) -> bool:
        return self.margin is not None

    @property
    def detectable(self) -> float | None:
        """The minimum detectable effect; None without an interval."""
        return None if self.loss is Loss.FLIP else detectable_of(self.interval)


class Judged(Protocol):
    """Any result: these two kinds, and those of the engine as it is served."""

    @property
    def is_judged(self) -> bool: ...

    @property
    def verdict(self) -> Verdict: ...

    @property
    def reason(self) -> str: ...


class GroupedResult(Judged, Protocol):
    """A result whose group the verdict names once."""

    @property
    def group(self) -> str: ...


@dataclass(frozen=True, slots=True)
class GateResult:
    metrics: tuple[MetricResult, ...]
    losses: tuple[LossResult, ...] = ()
    others: tuple[GroupedResult, ...] = ()  # conditions as served, speed

    @property
    def judged(self) -> tuple[Judged, ...]:
        results: list[Judged] = [*self.metrics, *self.losses, *self.others]
        return tuple(result for result in results if result.is_judged)

    @property
    def verdict(self) -> Verdict:
        if not self._judges_quality:
            return Verdict.FAIL
        return max((m.verdict for m in self.judged), key=SEVERITY.index)

    @property
    def _judges_quality(self) -> bool:
        """False if the suite only has criteria for other precisions, or for evidence that the engine lacks."""
        return any(metric.is_judged for metric in self.metrics) or any(loss.is_judged for loss in self.losses)

    def passes(self, *, inconclusive: bool) -> bool:
        """`inconclusive`: whether an inconclusive verdict passes, as the suite says."""
        return self.verdict is Verdict.PASS or (inconclusive and self.verdict is Verdict.INCONCLUSIVE)

    @property
    def reasons(self) -> list[str]:
        """Reasons of the results that determined the verdict."""
        if not self._judges_quality:
            return [NO_CRITERION]
        return [metric.reason for metric in self.judged if metric.verdict is self.verdict]


def judge(
    baseline: Scores, engine: Scores, *, margins: Mapping[str, float], floors: Mapping[str, float], seed: int = 0
) -> GateResult:
    """Judge both sides' scores of the same samples in the same order; returns a verdict for every metric."""
    return GateResult(
        tuple(
            judge_metric(
                name, baseline[name], engine[name], margin=margins.get(name), floor=floors.get(name), seed=seed
            )
            for name in baseline
        )
    )


def judge_metric(
    name: str,
    baseline: NDArray[np.float64],
    engine: NDArray[np.float64],
    *,
    margin: float | None,
    floor: float | None = None,
    seed: int = 0,
) -> MetricResult:
    difference = paired_bootstrap(engine - baseline, seed=seed)
    below_floor = floor is not None and float(engine.mean()) < floor
    verdict = Verdict.FAIL if below_floor else _verdict(difference, margin)
    doubt = _doubt(baseline, engine, margin, seed) if verdict is Verdict.PASS else ""
    return MetricResult(
        name,
        float(baseline.mean()),
        float(engine.mean()),
        difference,
        margin,
        floor,
        Verdict.INCONCLUSIVE if doubt else verdict,
        doubt,
        detectable(spread(engine - baseline), baseline.size, worst=float(baseline.mean())),
        Flips.of(engine - baseline) if name in BINARY else None,
    )


def _doubt(baseline: NDArray[np.float64], engine: NDArray[np.float64], margin: float | None, seed: int) -> str:
    """Why these samples cannot clear any engine, or an empty string."""
    if margin is None and float(engine.mean()) <= 0.0:
        return "the engine scores 0 (check that it answers and that the references fit)"
    if margin is not None and float(baseline.mean()) <= margin:
        return (
            f"the baseline itself scores {baseline.mean():.2f}, so no engine can lose more than {margin:g} "
            "(check that it answers and that the references fit)"
        )
    if baseline.size < MIN_SAMPLES:
        return f"{baseline.size} samples are too few to clear an engine; at least {MIN_SAMPLES} are needed"
    return "" if margin is None else _doubt_of_rare_losses(baseline, engine - baseline, margin, seed)


def _doubt_of_rare_losses(
    baseline: NDArray[np.float64], differences: NDArray[np.float64], margin: float, seed: int
) -> str:
    """The doubt if the engine would not pass with one more sample, whose answer is worthless."""
    worst = float(baseline.mean())
    low = paired_bootstrap(np.append(differences, -worst), seed=seed).low
    if low >= -margin - ROUNDING:
        return ""
    needed = samples_needed(spread(differences), margin, worst=worst)
    return (
        f"with one more worthless answer, the engine could lose {-low:.2f}: {baseline.size} samples may have "
        f"missed such answers; about {needed} clear an engine that loses nothing"
    )


def _verdict(difference: Interval, margin: float | None) -> Verdict:
    if margin is None or difference.low >= -margin - ROUNDING:
        return Verdict.PASS
    return Verdict.FAIL if difference.high < -margin - ROUNDING else Verdict.INCONCLUSIVE


def judge_losses(evidence: Evidence | str, margins: Mapping[str, float], *, seed: int = 0) -> tuple[LossResult, ...]:
    """A verdict for every loss. Without evidence (a text says why), losses with a margin are inconclusive."""
    if isinstance(evidence, str):
        doubt, nothing = (
            f"the engine returned no log-probs for the baseline's answers ({evidence})",
            Interval(0.0, 0.0, 0.0),
        )
        return tuple(
            LossResult(loss, nothing, margins[loss.value], Verdict.INCONCLUSIVE, doubt)
            for loss in Loss
            if loss.value in margins
        )
    results = tuple(
        judge_loss(loss, evidence.interval(loss, seed=seed), margins.get(loss.value), len(evidence.lengths))
        for loss in Loss
    )
    if not evidence.num_broken:
        return results
    doubt = f"the engine's log-probs are not finite at {evidence.num_broken} of {evidence.num_positions} positions"
    return tuple(
        replace(result, verdict=Verdict.FAIL, doubt=doubt) if result.is_judged else result for result in results
    )


def judge_loss(loss: Loss, interval: Interval, margin: float | None, num_samples: int) -> LossResult:
    if margin is None or interval.high <= margin:
        verdict = Verdict.PASS
    else:
        verdict = Verdict.FAIL if interval.low > margin else Verdict.INCONCLUSIVE
    if verdict is Verdict.PASS and margin is not None and num_samples < MIN_SAMPLES:
        doubt = f"{num_samples} samples are too few to clear an engine; at least {MIN_SAMPLES} are needed"
        return LossResult(loss, interval, margin, Verdict.INCONCLUSIVE, doubt)
    return LossResult(loss, interval, margin, verdict)
