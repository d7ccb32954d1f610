from __future__ import annotations

import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer

from llmserve.evaluation.rouge import METRICS, rouge_scores
from llmserve.evaluation.statistics import first_divergence, paired_bootstrap

TEXTS = ["Returns the opened files.", "read a line", "", "The cat sat on the mat.\nIt slept."]
REFERENCES = ["Return an open file.", "Read one line.", "Nothing.", "A cat slept.\nThe cat sat on a mat."]


@pytest.mark.parametrize("stemming", [True, False])
def test_rouge_is_the_packages_own(stemming: bool) -> None:
    scorer = RougeScorer(list(METRICS), use_stemmer=stemming)
    scores = rouge_scores(TEXTS, REFERENCES, stemming=stemming)
    for index, (text, reference) in enumerate(zip(TEXTS, REFERENCES, strict=True)):
        expected = scorer.score(reference, text)
        for name in METRICS:
            assert scores[name][index] == pytest.approx(100 * expected[name].fmeasure)


def test_stemming_matters() -> None:
    with_stems, without = (rouge_scores(TEXTS, REFERENCES, stemming=s)["rouge1"][0] for s in (True, False))
    assert with_stems > without


def test_interval_covers_the_true_mean_about_95_times_in_100() -> None:
    generator = np.random.default_rng(1)
    covered = 0
    for seed in range(100):
        interval = paired_bootstrap(generator.normal(0.5, 3.0, 120), seed=seed, resamples=1000)
        covered += interval.low <= 0.5 <= interval.high
    assert 88 <= covered <= 99


def test_interval_shrinks_with_samples_and_repeats_with_the_seed() -> None:
    differences = np.random.default_rng(2).normal(0, 5, 2000)
    few, many = paired_bootstrap(differences[:50]), paired_bootstrap(differences)
    assert many.high - many.low < (few.high - few.low) / 3
    assert paired_bootstrap(differences, seed=3) == paired_bootstrap(differences, seed=3)
    assert paired_bootstrap(differences, seed=3) != paired_bootstrap(differences, seed=4)
    assert many.low < many.mean < many.high
    assert many.mean == pytest.approx(differences.mean())


def test_a_constant_difference_has_no_width() -> None:
    assert paired_bootstrap(np.full(7, -0.3)) == paired_bootstrap(np.full(1, -0.3))


@pytest.mark.parametrize(
    ("expected", "actual", "position"),
    [((1, 2, 3), (1, 2, 3), None), ((1, 2, 3), (1, 9, 3), 1), ((1, 2), (1, 2, 3), 2), ((), (4,), 0), ((), (), None)],
)
def test_first_divergence(expected: tuple[int, ...], actual: tuple[int, ...], position: int | None) -> None:
    assert first_divergence(expected, actual) == position
    assert first_divergence(actual, expected) == position
