"""Hermes's format, also used by Qwen2.5 and Qwen3: a JSON object in a tag, for each call.

<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from llmserve.stages.answer_parts import PartReader
from llmserve.stages.tool_formats.grammars import answer_rules, marked, tool_rules
from llmserve.stages.tool_formats.json_calls import CallReader
from llmserve.stages.tool_formats.tool_format import Tool

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Hermes:
    name: str = "hermes"
    markers: Sequence[str] = (BEGIN, END)

    def reader(self, tools: Sequence[Tool]) -> PartReader:
        return HermesReader([tool.name for tool in tools], BEGIN)

    def rules(self, tools: Sequence[Tool], text: str | None, *, several: bool, special: Collection[str]) -> str:
        body = rf'"\n" tool "\n" {marked(END, special)}'
        more = rf' ("\n" {marked(BEGIN, special)} {body})*' if several else ""
        return f"{answer_rules(text, BEGIN, body + more, special)}\n{tool_rules(tools, 'arguments')}"

    def call_id(self, call_id: str, name: str = "", index: int = 0) -> str:
        return call_id


class HermesReader(CallReader):
    def _behind_call(self) -> bool:
        """The closing tag, unless the model has forgotten it."""
        rest = self._waiting.lstrip()
        if END.startswith(rest) and rest != END and not self._is_last:
            return False
        self._waiting = rest.removeprefix(END)
        self._state = self._in_text
        return True
