"""What an answer is made of, as it is read piece by piece: text, a thought before it, calls of tools."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class PartKind(Enum):
    TEXT = "text"
    THOUGHT = "thought"
    CALL = "call"  # begins: the text is the tool's name
    ARGUMENTS = "arguments"  # of the call that began last: the next piece of their JSON


@dataclass(frozen=True, slots=True)
class Part:
    kind: PartKind
    text: str


class PartReader(Protocol):
    """Of one answer."""

    def read(self, text: str, *, is_last: bool = False) -> list[Part]:
        """What is certain after `text`, the next piece of the answer. The last piece may be empty."""
        ...
