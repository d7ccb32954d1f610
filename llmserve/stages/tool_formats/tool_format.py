"""The interfaces of tool calls: a tool, and a format of calls."""

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
        """Texts that mark calls. In some vocabularies, some of them are special tokens."""
        ...

    def reader(self, tools: Sequence[Tool]) -> PartReader:
        """Reads one answer. Text that looks like a call of an unknown tool is text."""
        ...

    def rules(self, tools: Sequence[Tool], text: str | None, *, several: bool, special: Collection[str]) -> str:
        """Rules of a guide in llguidance's Lark, starting with `answer`: calls whose arguments match the schemas.

        `text`: a rule for text instead of calls, None: none; `grammars.FREE_TEXT` may also precede them. `several`:
        whether more than one call is allowed. `special`: the markers that are special tokens.
        """
        ...

    def call_id(self, call_id: str, name: str = "", index: int = 0) -> str:
        """A call's id, in the form that chat templates of this format expect. `name`: the tool's, empty: unknown;
        `index`: the number of the call in the conversation."""
        ...
