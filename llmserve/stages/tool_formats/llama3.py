"""Llama 3's format: the answer is a JSON object, which may follow a special token.

{"name": "weather", "parameters": {"city": "Rome"}}
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from llmserve.stages.answer_parts import PartReader
from llmserve.stages.tool_formats.grammars import FREE_TEXT, marked, tool_rules
from llmserve.stages.tool_formats.json_calls import CallReader
from llmserve.stages.tool_formats.tool_format import Tool

PYTHON_TAG = "<|python_tag|>"
BETWEEN = " \t\r\n;,"  # separates calls if a model makes several
NOT_AN_OBJECT = r"/\s*[^{\s](.|\n)*/"


@dataclass(frozen=True, slots=True)
class Llama3:
    name: str = "llama3"
    markers: Sequence[str] = (PYTHON_TAG,)

    def reader(self, tools: Sequence[Tool]) -> PartReader:
        return Llama3Reader([tool.name for tool in tools], PYTHON_TAG)

    def rules(self, tools: Sequence[Tool], text: str | None, *, several: bool, special: Collection[str]) -> str:
        """Only one call, whatever `several` says, because its templates accept no more."""
        tag = f"{marked(PYTHON_TAG, special)}?" if PYTHON_TAG in special else ""
        rules = f"calls: {tag} tool\n{tool_rules(tools, 'parameters')}"
        if text == FREE_TEXT:
            return f"answer: TEXT | calls\nTEXT: {NOT_AN_OBJECT}\n{rules}"
        return f"answer: calls{'' if text is None else f' | {text}'}\n{rules}"

    def call_id(self, call_id: str, name: str = "", index: int = 0) -> str:
        return call_id


class Llama3Reader(CallReader):
    """An answer that begins with an object is a call; after other text, only the token marks one."""

    def __init__(self, names: Collection[str], marker: str, end: str = "") -> None:
        super().__init__(names, marker)
        self._end = end  # of a call that the marker begins
        self._state = self._at_beginning

    def _at_beginning(self) -> bool:
        rest = self._waiting.lstrip()
        if not rest and not self._is_last:
            return False
        self._state = super()._behind_marker if rest[:1] == "{" else self._in_text
        return True

    def _behind_call(self) -> bool:
        rest = self._waiting.lstrip(BETWEEN)
        if rest != self._end and self._end.startswith(rest) and not self._is_last:
            return False
        rest = rest.removeprefix(self._end).lstrip(BETWEEN)
        if not rest:
            return False
        self._opening = self._waiting[: len(self._waiting) - len(rest)] if rest[0] == "{" else ""
        self._waiting, self._state = rest, super()._behind_marker if rest[0] == "{" else self._in_text
        return True
