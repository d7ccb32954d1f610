"""ROUGE of texts against references, one score per sample, computed by the rouge-score package."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmserve.errors import Unsupported

METRICS = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def rouge_scores(texts: Sequence[str], references: Sequence[str], *, stemming: bool) -> dict[str, NDArray[np.float64]]:
    """F measure x 100 of every text, by metric; each array has one entry per text.

    With `stemming`, words are reduced to their stems first (Porter), as most papers do.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise Unsupported("ROUGE needs the rouge-score package: pip install 'llmserve[eval]'") from error
    scorer = RougeScorer(list(METRICS), use_stemmer=stemming)
    scores = [scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)]
    return {name: np.array([100 * score[name].fmeasure for score in scores]) for name in METRICS}
