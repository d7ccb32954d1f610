"""Tactics are ways to compute the same bits. Their times on a device are kept in `model.cache`.

If the cache is missing or from another device, the defaults are used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmserve import __version__
from llmserve.engine.runtime import TacticChoice

FORMAT_VERSION = 4  # increase it when kernels change so that old timings are wrong
WORTHWHILE = 0.97  # a tactic replaces the default only if it needs less than this share of its time


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything that timings depend on."""

    device: str  # the processor's or the GPU's model
    kernels: str  # kernels in use: instruction set or architecture
    llmserve: str = __version__


@dataclass(frozen=True, slots=True)
class TacticCache:
    """Microseconds by layer, row bucket and tactic."""

    machine: Machine
    microseconds: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, machine: Machine) -> TacticCache:
        """The timings in `path` if they were measured on this machine; empty otherwise."""
        try:
            content = json.loads(path.read_text())
            if content["format_version"] == FORMAT_VERSION and Machine(**content["machine"]) == machine:
                return cls(machine, _checked(content["microseconds"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # timings can be measured again, and only the speed depends on them
        return cls(machine)

    def save(self, path: Path) -> None:
        content = {"format_version": FORMAT_VERSION, "machine": asdict(self.machine), "microseconds": self.microseconds}
        path.write_text(json.dumps(content, indent=1) + "\n")

    def timings(self, layer: str, rows: int) -> Mapping[str, float]:
        """Tactic -> microseconds for a bucket of rows; empty if not measured."""
        return self.microseconds.get(layer, {}).get(str(rows), {})


def _checked(microseconds: Any) -> dict[str, dict[str, dict[str, float]]]:
    return {
        str(layer): {
            str(rows): {str(tactic): float(value) for tactic, value in timings.items()}
            for rows, timings in buckets.items()
        }
        for layer, buckets in microseconds.items()
    }


def choose_tactic(names: Sequence[str], default: str, rows: int, timings: Mapping[str, float]) -> TacticChoice:
    """The fastest measured one of `names`, or the default if it is about as fast."""
    known = {name: value for name, value in timings.items() if name in names}
    if default not in known:
        return TacticChoice(rows, default, names.index(default), "default, not measured on this machine")
    best = min(known, key=lambda name: known[name])
    if len(known) == 1:
        return TacticChoice(rows, default, names.index(default), "the only one")
    if known[best] >= WORTHWHILE * known[default]:
        reason = f"default, {known[default]:.0f} us; no other is faster"
        return TacticChoice(rows, default, names.index(default), reason)
    reason = f"{known[best]:.0f} us; default {default} {known[default]:.0f} us"
    return TacticChoice(rows, best, names.index(best), reason)
