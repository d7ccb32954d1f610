"""Lengths as flags say them: what is drawn, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmserve.benchmark.lengths import MAX_LENGTH, parse_lengths
from llmserve.errors import InvalidArgument

DRAWS = 20_000


def drawn(text: str) -> np.ndarray:
    generator = np.random.default_rng(1)
    lengths = parse_lengths(text)
    return np.array([lengths.draw(generator) for _ in range(DRAWS)])


def test_a_number_is_that_number() -> None:
    assert set(drawn("128")) == {128}


def test_uniform_lengths_have_both_ends_and_all_between() -> None:
    assert set(drawn("uniform:3:7")) == {3, 4, 5, 6, 7}


@pytest.mark.parametrize("kind", ["normal", "lognormal"])
def test_mean_and_deviation_are_those_of_the_lengths(kind: str) -> None:
    found = drawn(f"{kind}:550:150")
    assert found.mean() == pytest.approx(550, rel=0.01)
    assert found.std() == pytest.approx(150, rel=0.03)
    skew = ((found - found.mean()) ** 3).mean() / found.std() ** 3
    assert (skew > 0.5) == (kind == "lognormal")


def test_no_length_is_below_one() -> None:
    assert drawn("normal:2:50").min() == 1


def test_lengths_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("5\n70 5\n")
    found = drawn(f"file:{tmp_path / 'lengths.txt'}")
    assert set(found) == {5, 70}
    assert (found == 5).mean() == pytest.approx(2 / 3, abs=0.02)


@pytest.mark.parametrize(
    "text",
    [
        "", "0", "-5", "1.5", "many", "uniform", "uniform:5", "uniform:9:3", "uniform:0:3", "normal:100", "normal:0:1",
        "normal:100:-1", "normal:nan:1", "lognormal:inf:1", "lognormal:a:b", "zipf:1:2", str(MAX_LENGTH + 1),
        "uniform:1:2:3", "128:5",
    ],
)  # fmt: skip
def test_what_is_no_length_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(InvalidArgument, match="uniform:LOW:HIGH, normal:MEAN:DEVIATION"):
        parse_lengths(text)


@pytest.mark.parametrize(
    ("content", "words"), [(None, "cannot be read"), ("", "has no lengths"), ("5 -1", "'-1' is none")]
)
def test_a_file_that_has_no_lengths(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "x").write_text(content)
    with pytest.raises(InvalidArgument, match=words):
        parse_lengths(f"file:{tmp_path / 'x'}")
