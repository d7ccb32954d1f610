"""The number of tokens of prompts and answers: a number or a distribution, as given by a flag."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from llmserve.errors import InvalidArgument

FORMS = "N, uniform:LOW:HIGH, normal:MEAN:DEVIATION, lognormal:MEAN:DEVIATION or file:PATH"
MAX_LENGTH = 10_000_000  # of a prompt or an answer; more is a typing error


class Lengths(Protocol):
    def draw(self, generator: np.random.Generator) -> int:
        """Returns at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    length: int

    def draw(self, generator: np.random.Generator) -> int:
        return self.length


@dataclass(frozen=True, slots=True)
class Uniform:
    low: int
    high: int  # inclusive

    def draw(self, generator: np.random.Generator) -> int:
        return int(generator.integers(self.low, self.high + 1))


@dataclass(frozen=True, slots=True)
class Normal:
    """Rounded, and at least 1."""

    mean: float
    deviation: float

    def draw(self, generator: np.random.Generator) -> int:
        return max(round(generator.normal(self.mean, self.deviation)), 1)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """`mean` and `deviation` are those of the lengths, not of their logarithms."""

    mean: float
    deviation: float

    def draw(self, generator: np.random.Generator) -> int:
        variance = math.log1p((self.deviation / self.mean) ** 2)
        return max(round(generator.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance))), 1)


@dataclass(frozen=True, slots=True)
class Listed:
    """Lengths from a file, all equally likely."""

    lengths: tuple[int, ...]

    def draw(self, generator: np.random.Generator) -> int:
        return self.lengths[int(generator.integers(len(self.lengths)))]


def parse_lengths(text: str) -> Lengths:
    """Parses the flag. Raises `InvalidArgument`."""
    kind, _, rest = text.partition(":")
    if kind == "file":
        return _listed(Path(rest))
    try:
        if kind.isdecimal() and not rest:
            return Fixed(_length(kind))
        first, second = rest.split(":")
        if kind == "uniform":
            low, high = _length(first), _length(second)
            if low <= high:
                return Uniform(low, high)
        elif kind in ("normal", "lognormal"):
            mean, deviation = float(first), float(second)
            if 1 <= mean <= MAX_LENGTH and 0 <= deviation <= MAX_LENGTH:
                return Normal(mean, deviation) if kind == "normal" else LogNormal(mean, deviation)
    except ValueError:
        pass
    raise InvalidArgument(f"{text!r} is not a valid length: {FORMS}; lengths are from 1 to {MAX_LENGTH}")


def _listed(path: Path) -> Listed:
    try:
        words = path.read_text(encoding="utf-8").split()
        lengths = tuple(map(_length, words))
    except OSError as error:
        raise InvalidArgument(f"file:{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidArgument(f"file:{path} must have lengths from 1 to {MAX_LENGTH}: {error}") from error
    if not lengths:
        raise InvalidArgument(f"file:{path} has no lengths")
    return Listed(lengths)


def _length(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MAX_LENGTH):
        raise ValueError(f"{text!r} is none")
    return int(text)
