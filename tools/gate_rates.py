"""Measures how often the release gate is wrong: many runs of it on samples whose true loss is known.

python -m tools.gate_rates REPORT.json [--trials 400]

The report is one of `llmserve eval` on an engine that is nearly as good as its baseline. Runs draw their samples from
it. A worse engine is simulated in the way that is hardest to detect: a few answers are spoiled completely (their score
becomes 0), the others stay. Divergence is multiplied by a factor instead, as if rounding became coarser. Every trial
draws new samples, spoils some, and runs the gate.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.evaluation.judging.evidence import Loss
from llmserve.evaluation.judging.gate import Verdict, judge_loss, judge_metric
from llmserve.evaluation.judging.statistics import paired_bootstrap
from tools.benchmark.markdown import table

Floats = NDArray[np.float64]
LOSSES = (0.0, 0.5, 1.0, 1.5, 2.0)  # in margins
SIZES = (50, 200, 500)
SEED = 20


@dataclass(frozen=True, slots=True)
class World:
    """The population of samples: scores of both sides for each, and its mean divergence."""

    metric: str
    margin: float
    baseline: Floats
    engine: Floats
    kl: Floats
    kl_margin: float

    @classmethod
    def of(cls, report: dict[str, Any], metric: str = "rougeL") -> World:
        def scores(side: str) -> Floats:
            return np.array([sample[side]["scores"][metric] for sample in report["samples"]])

        rules = report["suite"]["rules"]
        precision = report["engine"].get("precision", "float")
        return cls(
            metric,
            rules["margins"][metric],
            scores("baseline"),
            scores("engine"),
            np.array(report["evidence"]["kl_of_samples"]),
            rules["loss_margins"][precision]["kl"],
        )

    def text_verdict(self, generator: np.random.Generator, num_samples: int, loss: float) -> Verdict:
        """The gate's verdict on an engine that truly loses `loss` margins."""
        drawn = generator.integers(self.baseline.size, size=num_samples)
        baseline, engine = self.baseline[drawn], self.engine[drawn].copy()
        kept_loss = float((self.baseline - self.engine).mean())
        rate = max(0.0, (loss * self.margin - kept_loss) / float(self.engine.mean()))
        engine[generator.random(num_samples) < rate] = 0.0
        return judge_metric(self.metric, baseline, engine, margin=self.margin).verdict

    def kl_verdict(self, generator: np.random.Generator, num_samples: int, loss: float) -> Verdict:
        drawn = self.kl[generator.integers(self.kl.size, size=num_samples)]
        interval = paired_bootstrap(drawn * (loss * self.kl_margin / float(self.kl.mean())))
        return judge_loss(Loss.KL, interval, self.kl_margin, num_samples).verdict


def rates(
    verdict: Callable[[np.random.Generator, int, float], Verdict],
    trials: int,
    *,
    losses: Sequence[float] = LOSSES,
    sizes: Sequence[int] = SIZES,
) -> Iterator[tuple[float, int, Counter[Verdict]]]:
    """Yields the true loss in margins, the number of samples, and how often each verdict occurred."""
    for num_samples in sizes:
        for loss in losses:
            generator = np.random.default_rng((SEED, num_samples, int(10 * loss)))
            yield loss, num_samples, Counter(verdict(generator, num_samples, loss) for _ in range(trials))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--trials", type=int, default=400)
    options = parser.parse_args()
    world = World.of(json.loads(options.report.read_text()))
    for name, verdict in ((world.metric, world.text_verdict), ("kl", world.kl_verdict)):
        rows = [
            (f"{loss:g}", str(size), *(f"{100 * found[each] / options.trials:.1f}" for each in Verdict))
            for loss, size, found in rates(verdict, options.trials)
        ]
        print(f"\n{name}, {options.trials} runs each, percent\n")
        print(table(["true loss, margins", "samples", *(each.value for each in Verdict)], rows))


if __name__ == "__main__":
    main()
