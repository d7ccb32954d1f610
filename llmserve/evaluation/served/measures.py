"""The measures of an engine as it is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measure:
    """`scale` converts its value to the displayed one, in `unit`."""

    title: str
    unit: str
    scale: float = 1.0
    more_is_better: bool = False


MEASURES: Mapping[str, Measure] = {
    "ttft": Measure("first token", "ms", 1e3),  # alone, median, seconds
    "itl": Measure("next tokens", "ms", 1e3),  # alone, median of the answers' means, seconds
    "throughput": Measure("throughput", "tokens/s", more_is_better=True),  # all at once, without prefix cache
    "memory": Measure("peak memory", "MiB", 2.0**-20),  # of the server, bytes
    "build": Measure("building", "s"),  # of the engine, on the same class of machine, seconds
    "open": Measure("opening", "s"),  # from the server's start until it is ready, seconds
}
