"""How long-running work reports its progress. The command line shows it; library callers may omit it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    seconds: float  # measured elsewhere, relative to the other phases


class Progress(Protocol):
    def expect(self, phases: Sequence[Phase]) -> None:
        """Announces all phases, in order. Without this call, no remaining time is shown."""
        ...

    def phase(self, name: str, total_bytes: int) -> None:
        """Begins a new phase of `total_bytes`."""
        ...

    def advance(self, what: str, num_bytes: int) -> None:
        """Reports `num_bytes` more of this phase as done, the last of them for `what`."""
        ...


class SilentProgress:
    def expect(self, phases: Sequence[Phase]) -> None:
        pass

    def phase(self, name: str, total_bytes: int) -> None:
        pass

    def advance(self, what: str, num_bytes: int) -> None:
        pass
