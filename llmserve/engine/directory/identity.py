"""The identity of a model's engine, as the server reports it over gRPC and /v1 for evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from llmserve.engine.directory.gate_record import GateRecord
from llmserve.engine.directory.manifest import Manifest
from llmserve.engine.registry import runtime_for
from llmserve.models.number_formats import UNROUNDED

SHOWN_CHARS = 12  # characters of a digest in messages
PREFIX = "engine_"  # prefix of these facts in the parameters of a model's config


def told_apart(first: str, second: str) -> tuple[str, str]:
    """Two digests for a message about their difference: short, but long enough to show it."""
    first_difference = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
    shown = max(SHOWN_CHARS, first_difference + 1)
    return first[:shown], second[:shown]


def gate_facts(gates: Sequence[GateRecord]) -> list[dict[str, Any]]:
    """Verdicts of release gates, as JSON."""
    return [{"suite": gate.suite, "passed": gate.passed, "verdict": gate.verdict, "time": gate.time} for gate in gates]


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    digest: str
    target: str
    dtype: str
    precision: str  # of weights: `NumberFormat.precision`
    is_deterministic: bool  # whether it guarantees identical bits, independent of other requests in the batch

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        return cls(
            manifest.engine_digest,
            manifest.target,
            manifest.dtype,
            str(manifest.options["quantization"]) or UNROUNDED,
            bool(runtime_for(manifest.target).kernels()),
        )

    def parameters(self) -> dict[str, str]:
        """Parameters of a model's config."""
        words = {**self._named(), "deterministic": str(self.is_deterministic).lower()}
        return {PREFIX + name: str(value) for name, value in words.items()}

    @classmethod
    def read(cls, parameters: Mapping[str, str]) -> Self | None:
        """Read what `parameters` wrote; None if the server does not report it."""
        names = ("digest", "target", "dtype", "precision", "deterministic")
        found = [parameters.get(PREFIX + name, "") for name in names]
        digest, target, dtype, precision, deterministic = found
        return cls(digest, target, dtype, precision, deterministic == "true") if all(found) else None

    def document(self, gates: Sequence[GateRecord]) -> dict[str, Any]:
        """The identity as JSON, with the verdicts of release gates."""
        return {**self._named(), "deterministic": self.is_deterministic, "gate": gate_facts(gates)}

    def _named(self) -> dict[str, str]:
        return {"digest": self.digest, "target": self.target, "dtype": self.dtype, "precision": self.precision}
