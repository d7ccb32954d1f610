"""The nouns of tool calls: a tool, and a form in which models write calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llmserve.stages.answer_parts import PartReader


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Mapping[str, Any]  # the schema of its arguments


class ToolFormat(Protocol):
    """Stateless."""

    @property
    def name(self) -> str: ...

    @property
    def markers(self) -> Sequence[str]:
        """Texts that mark calls. Some of them are special tokens in some vocabularies."""
        ...

    def reader(self, tools: Sequence[Tool]) -> PartReader:
        """Of one answer. What looks like a call of another tool is text."""
        ...

    def rules(self, tools: Sequence[Tool], text: str | None, *, several: bool, special: Collection[str]) -> str:
        """Rules of a guide in llguidance's Lark, of which `answer` is the first: calls whose arguments follow the
        schemas.

        `text`: a rule of what may stand instead of calls, None: nothing; `grammars.FREE_TEXT` may come before them,
        too. `several`: whether there may be more than one call. `special`: the markers that are special tokens.
        """
        ...

    def call_id(self, call_id: str) -> str:
        """A call's id, as chat templates of this form take it."""
        ...
