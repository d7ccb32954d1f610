"""Arrival times of requests that do not wait for earlier answers (an open loop), as given by a flag."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from llmserve.errors import InvalidArgument

FORMS = "poisson, constant, gamma:SHAPE (1 is poisson, less comes in bursts) or bursts:SIZE"


class Arrivals(Protocol):
    def gaps(self, rate: float, generator: np.random.Generator) -> Iterator[float]:
        """Yields the seconds between one arrival and the next, endlessly, at `rate` per second on average."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    def gaps(self, rate: float, generator: np.random.Generator) -> Iterator[float]:
        while True:
            yield 1 / rate


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gaps have a gamma distribution: a shape of 1 is a Poisson process, and smaller shapes cluster arrivals."""

    shape: float = 1.0

    def gaps(self, rate: float, generator: np.random.Generator) -> Iterator[float]:
        while True:
            yield float(generator.gamma(self.shape, 1 / (rate * self.shape)))


@dataclass(frozen=True, slots=True)
class Bursts:
    """`size` requests at once, at regular intervals."""

    size: int

    def gaps(self, rate: float, generator: np.random.Generator) -> Iterator[float]:
        while True:
            yield from [0.0] * (self.size - 1)
            yield self.size / rate


def parse_arrivals(text: str) -> Arrivals:
    """Parses the flag. Raises `InvalidArgument`."""
    kind, _, rest = text.partition(":")
    try:
        if text == "poisson":
            return Gamma()
        if text == "constant":
            return Constant()
        if kind == "gamma" and 0 < float(rest) < float("inf"):
            return Gamma(float(rest))
        if kind == "bursts" and int(rest) >= 1:
            return Bursts(int(rest))
    except ValueError:
        pass
    raise InvalidArgument(f"{text!r} is not an arrival process: {FORMS}")


def arrival_times(arrivals: Arrivals, rate: float, generator: np.random.Generator) -> Iterator[float]:
    """Yields the seconds from the beginning; the first arrival is at 0."""
    now = 0.0
    for gap in arrivals.gaps(rate, generator):
        yield now
        now += gap
