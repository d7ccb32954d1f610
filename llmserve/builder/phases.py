"""The phases of a build, and the relative time of each, for `Progress.expect`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmserve.builder.resolve import ResolvedBuild
from llmserve.models.number_formats import WeightFormat
from llmserve.progress import Phase


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds on two cores of an AMD EPYC with AVX-512. On other machines, all phases are slower or faster alike."""

    compile: float  # per GB of weights in the engine's dtype
    selftest: float  # per GB of weights in the engine's dtype
    tactics: float  # independent of the size


FLOATS, ROUNDED, MIXED = Cost(7.0, 4.5, 7.0), Cost(6.5, 12.5, 2.5), Cost(16.5, 24.0, 2.0)
EQUALIZE, CALIBRATED_COMPILE = 5.0, 10.0  # per GB
CALIBRATE = 0.01  # per GB and token of the text
HASH, SEAL = 0.5, 0.2


def expected_phases(build: ResolvedBuild) -> Sequence[Phase]:
    """Phases in order."""
    size, text, target, cost = build.weight_bytes / 1e9, build.calibration, build.target, _cost(build.options.weights)
    rounds = target.rounds_activations and bool(build.quantized.keys() - build.kept)
    phases = {
        "calibrate": size * CALIBRATE * text.num_tokens if text and rounds else None,
        "equalize": size * EQUALIZE if rounds else None,
        "compile": size * (cost.compile + (CALIBRATED_COMPILE if text else 0.0)),
        "hash the checkpoint": HASH,
        "time tactics": cost.tactics if target.times_tactics else None,
        "self-test": size * cost.selftest if target.has_selftest else None,
        "seal": SEAL,
    }
    return [Phase(name, seconds) for name, seconds in phases.items() if seconds is not None]


def _cost(weights: WeightFormat) -> Cost:
    if weights.wider:
        return MIXED
    return ROUNDED if weights.is_rounded else FLOATS
