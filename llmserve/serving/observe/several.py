"""Merges the `/metrics` of several servers: counts are added up, shared values appear once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmserve.metrics import METRICS

AVERAGES = ("nv_cache_util",)


@dataclass(slots=True)
class _Family:
    header: list[str] = field(default_factory=list)
    samples: dict[str, float] = field(default_factory=dict)  # by name and labels
    adds_up: bool = True


def added_up(texts: Sequence[str]) -> str:
    """Merge texts. For quantiles, and values that all servers read from one engine or machine, the largest is used."""
    families: dict[str, _Family] = {}
    for text in texts:
        family = _Family()
        for line in text.splitlines():
            if line.startswith("#"):
                family = _family(families, line)
            elif line:
                _add(family, line)
    lines: list[str] = []
    for family in families.values():
        lines += family.header
        lines += [f"{key} {_number(value)}" for key, value in family.samples.items()]
    return "\n".join(lines) + "\n"


def _family(families: dict[str, _Family], comment: str) -> _Family:
    """The family of a line `# HELP name ...` or `# TYPE name ...`."""
    name = comment.split(" ", 3)[2]
    if name not in families:
        declared = METRICS.get(name)
        families[name] = _Family(adds_up=name not in AVERAGES and (declared is None or declared.adds_up))
    found = families[name]
    if comment not in found.header:
        found.header.append(comment)
    return found


def _add(family: _Family, line: str) -> None:
    key, _, value = line.rpartition(" ")
    number = float(value)
    if math.isnan(family.samples.get(key, math.nan)):  # not set yet, or a quantile of no observations
        family.samples[key] = number
    elif family.adds_up and "quantile=" not in key:
        family.samples[key] += number
    elif not math.isnan(number):
        family.samples[key] = max(family.samples[key], number)


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value.is_integer() else repr(value)
