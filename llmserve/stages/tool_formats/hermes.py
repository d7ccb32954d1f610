"""Hermes's form, which Qwen2.5 and Qwen3 have taken over: a JSON object in a tag, for each call.

<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from llmserve.stages.answer_parts import PartReader
from llmserve.stages.tool_formats.grammars import FREE_TEXT, literal, marked, tool_rules
from llmserve.stages.tool_formats.json_calls import CallReader
from llmserve.stages.tool_formats.tool_format import Tool

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Hermes:
    name: str = "hermes"
    markers: Sequence[str] = (BEGIN, END)

    def reader(self, names: Collection[str]) -> PartReader:
        return HermesReader(names, BEGIN)

    def rules(self, tools: Sequence[Tool], text: str | None, *, several: bool, special: Collection[str]) -> str:
        begin, end = marked(BEGIN, special), marked(END, special)
        body = rf'"\n" tool "\n" {end}'
        more = rf'("\n" {begin} {body})*' if several else ""
        rules = f"calls: {begin} {body} {more}\n{tool_rules(tools, 'arguments')}"
        if text == FREE_TEXT:
            lead = f"lead: TEXT {begin}" if BEGIN in special else f"lead[lazy]: TEXT {literal(BEGIN)}"
            return f"answer: TEXT | lead {body} {more}\nTEXT: {FREE_TEXT}\n{lead}\n{rules}"
        return f"answer: calls{'' if text is None else f' | {text}'}\n{rules}"

    def call_id(self, call_id: str) -> str:
        return call_id


class HermesReader(CallReader):
    def _behind_call(self) -> bool:
        """The closing tag, if the model has not forgotten it."""
        rest = self._waiting.lstrip()
        if END.startswith(rest) and rest != END and not self._is_last:
            return False
        self._waiting = rest.removeprefix(END)
        self._state = self._in_text
        return True
