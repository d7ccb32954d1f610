"""The parts of an answer, read piece by piece: text, a thought before it, and tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class PartKind(Enum):
    TEXT = "text"
    THOUGHT = "thought"
    CALL = "call"  # a call begins: the text is the tool's name
    ARGUMENTS = "arguments"  # arguments of the last call: the next piece of their JSON


@dataclass(frozen=True, slots=True)
class Part:
    kind: PartKind
    text: str


class PartReader(Protocol):
    """Reads one answer."""

    def read(self, text: str, *, is_last: bool = False) -> list[Part]:
        """Parts that are certain after `text`, the next piece of the answer. The last piece may be empty."""
        ...
