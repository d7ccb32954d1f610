"""How what takes long says where it is. The command line draws it; a library caller may pass nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    seconds: float  # that it took elsewhere, beside the other phases


class Progress(Protocol):
    def expect(self, phases: Sequence[Phase]) -> None:
        """All phases that will begin, in their order. Without it, nothing is said about when they end."""
        ...

    def phase(self, name: str, total_bytes: int) -> None:
        """A new phase begins, of so many bytes."""
        ...

    def advance(self, what: str, num_bytes: int) -> None:
        """`num_bytes` more of this phase are done, lately of `what`."""
        ...


class SilentProgress:
    def expect(self, phases: Sequence[Phase]) -> None:
        pass

    def phase(self, name: str, total_bytes: int) -> None:
        pass

    def advance(self, what: str, num_bytes: int) -> None:
        pass
