"""How what takes long says where it is. The command line draws it; a library caller may pass nothing."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    def phase(self, name: str, total_bytes: int) -> None:
        """A new phase begins, of so many bytes."""
        ...

    def advance(self, what: str, num_bytes: int) -> None:
        """`num_bytes` more of this phase are done, lately of `what`."""
        ...


class SilentProgress:
    def phase(self, name: str, total_bytes: int) -> None:
        pass

    def advance(self, what: str, num_bytes: int) -> None:
        pass
