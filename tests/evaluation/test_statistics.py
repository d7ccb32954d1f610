from __future__ import annotations

import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer

from llmserve.evaluation.judging.rouge import METRICS, rouge_scores
from llmserve.evaluation.judging.statistics import (
    first_divergence,
    paired_bootstrap,
    resampled_means,
    resampled_quantiles,
)

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


def test_positions_count_and_samples_are_drawn() -> None:
    """A long sample counts as often as it has positions; one that has none counts for nothing."""
    values, lengths = np.array([1.0, 1.0, 1.0, 5.0]), np.array([3, 0, 1])
    assert resampled_means(values, lengths).mean == 2.0
    one_each = np.random.default_rng(5).normal(1.0, 2.0, 90)
    found, wanted = resampled_means(one_each, np.ones(90, np.int64)), paired_bootstrap(one_each)
    assert [found.mean, found.low, found.high] == pytest.approx([wanted.mean, wanted.low, wanted.high])
    alike = np.repeat(np.random.default_rng(5).normal(1.0, 2.0, 9), 10)
    alone = resampled_means(alike, np.ones(90, np.int64))
    together = resampled_means(alike, np.full(9, 10))
    assert together.high - together.low > 2 * (alone.high - alone.low)
    assert resampled_means(np.zeros(0), np.zeros(4, np.int64)).high == 0


def test_quantiles_are_of_all_positions() -> None:
    values = np.random.default_rng(6).permutation(200).astype(float)
    found = resampled_quantiles(values, np.full(20, 10), 0.99)
    assert found.mean == 197.0  # 198 of 200 are no larger
    assert found.low < found.mean <= found.high <= 199
    assert resampled_quantiles(values, np.full(20, 10), 1.0).mean == 199
    assert resampled_quantiles(np.zeros(0), np.zeros(4, np.int64), 0.99).mean == 0


@pytest.mark.parametrize("quantile", [0.01, 0.5, 0.99, 1.0])
def test_quantiles_of_resamples_are_numpys(quantile: float) -> None:
    """Of so many positions that more than a first look at the largest is needed; some samples have none."""
    generator = np.random.default_rng(3)
    lengths = generator.integers(0, 40, 60)
    values, ends = generator.exponential(size=lengths.sum()).round(2), np.cumsum(lengths)
    samples = [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    drawn = np.random.default_rng(7).integers(60, size=(50, 60))
    expected = [
        np.quantile(np.concatenate([samples[index] for index in row]), quantile, method="inverted_cdf") for row in drawn
    ]
    found = resampled_quantiles(values, lengths, quantile, seed=7, resamples=50)
    assert found.mean == np.quantile(values, quantile, method="inverted_cdf")
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(expected, (0.025, 0.975))))


def test_the_interval_of_a_quantile_covers_the_true_one() -> None:
    generator = np.random.default_rng(7)
    covered = 0
    for seed in range(60):
        drawn = resampled_quantiles(generator.exponential(size=3000), np.full(300, 10), 0.9, seed=seed, resamples=300)
        covered += drawn.low <= np.log(10) <= drawn.high
    assert 51 <= covered <= 60


@pytest.mark.parametrize(
    ("expected", "actual", "position"),
    [((1, 2, 3), (1, 2, 3), None), ((1, 2, 3), (1, 9, 3), 1), ((1, 2), (1, 2, 3), 2), ((), (4,), 0), ((), (), None)],
)
def test_first_divergence(expected: tuple[int, ...], actual: tuple[int, ...], position: int | None) -> None:
    assert first_divergence(expected, actual) == position
    assert first_divergence(actual, expected) == position
