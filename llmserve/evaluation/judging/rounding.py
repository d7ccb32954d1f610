"""The cost of correct rounding for this network on these samples, as a measure of how much an engine may lose.

The same model reads a 16-bit baseline again in float32, and a float32 baseline in float16. The divergence between the
two readings is the cost of 16 bits. The cost of quantized weights was measured by the build's own reference, and is in
the manifest. A suite allows a multiple of the sum of both (`rounding_margins`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llmserve.evaluation.answers import Answer
from llmserve.evaluation.judging.evidence import PERCENTILE, Loss
from llmserve.evaluation.suite import Suite
from llmserve.models.number_formats import FLOAT16, FLOAT32, UNROUNDED

LEAST = 1e-8  # nats: single precision is no more accurate


def other_dtype(dtype: str) -> str:
    """The dtype in which a baseline's answers are read again."""
    return FLOAT16.name if dtype == FLOAT32.name else FLOAT32.name


def loss_margins(
    suite: Suite, baseline: Mapping[str, str], answers: Sequence[Answer], engine: Mapping[str, str]
) -> tuple[dict[str, float], str]:
    """The limit of each loss, from facts about both sides, and a description of its source."""
    precision = engine.get("precision", UNROUNDED)
    margins, times = dict(suite.loss_margins.get(precision, {})), suite.rounding_margins.get(precision)
    if times is None:
        return margins, ""
    rounded_to = FLOAT16.name if baseline["dtype"] == FLOAT32.name else baseline["dtype"]
    is_ruler = engine.get("dtype", "").partition("+")[0] in (rounded_to, FLOAT32.name)
    costs = _costs(answers, precision, engine.get("rounding_loss")) if is_ruler else {}
    if not costs:
        return margins, "not known for this pair of engine and baseline; only loss_margins count"
    for loss, cost in costs.items():
        margins[loss] = min(times * max(cost, LEAST), margins.get(loss, np.inf))
    told = ", ".join(f"{loss} {cost:.2g}" for loss, cost in costs.items())
    return margins, f"{told} in {rounded_to if precision == UNROUNDED else precision}; at most {times:g} times that"


def _costs(answers: Sequence[Answer], precision: str, of_weights: str | None) -> dict[str, float]:
    """Costs by loss; unknown ones are missing."""
    found = np.array([value for answer in answers for value in answer.rounding])
    is_known = len(found) == sum(len(answer.decisions) for answer in answers) and np.isfinite(found).all()
    if not is_known or not found.size or (precision != UNROUNDED and of_weights is None):
        return {}
    if precision != UNROUNDED:
        return {Loss.KL.value: float(found.mean()) + float(of_weights or 0.0)}
    largest = float(np.quantile(found, PERCENTILE, method="inverted_cdf"))
    return {Loss.KL.value: float(found.mean()), Loss.KL_P99.value: largest}
