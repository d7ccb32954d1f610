"""Mistral's two formats, after a special token. The older one is a list of calls; the newer one writes names directly:

[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]
[TOOL_CALLS]weather[ARGS]{"city": "Rome"}
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from llmserve.stages.answer_parts import Part, PartKind, PartReader
from llmserve.stages.tool_formats.grammars import answer_rules, arguments_rules, literal, marked, tool_rules
from llmserve.stages.tool_formats.json_calls import CallReader, ValueEnd
from llmserve.stages.tool_formats.tool_format import Tool

CALLS, ARGS = "[TOOL_CALLS]", "[ARGS]"
NAMED = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")
MAX_NAME = 300  # characters within which a call's arguments begin
ID_LENGTH = 9  # letters and digits, as its templates require


@dataclass(frozen=True, slots=True)
class Mistral:
    name: str = "mistral"
    markers: Sequence[str] = (CALLS,)

    def reader(self, tools: Sequence[Tool]) -> PartReader:
        return MistralReader([tool.name for tool in tools], CALLS)

    def rules(self, tools: Sequence[Tool], text: str | None, *, several: bool, special: Collection[str]) -> str:
        more = '(", " tool)*' if several else ""
        body = f'" "? "[" tool {more} "]"'
        return f"{answer_rules(text, CALLS, body, special)}\n{tool_rules(tools, 'arguments')}"

    def call_id(self, call_id: str, name: str = "", index: int = 0) -> str:
        return _short_id(call_id)


@dataclass(frozen=True, slots=True)
class MistralNamed:
    """The newer format."""

    name: str = "mistral_args"
    markers: Sequence[str] = (CALLS, ARGS)

    def reader(self, tools: Sequence[Tool]) -> PartReader:
        return MistralReader([tool.name for tool in tools], CALLS)

    def rules(self, tools: Sequence[Tool], text: str | None, *, several: bool, special: Collection[str]) -> str:
        begin, args = marked(CALLS, special), marked(ARGS, special)
        more = f"({begin} tool)*" if several else ""
        each = "\n".join(f"tool_{i}: {literal(tool.name)} {args} args_{i}" for i, tool in enumerate(tools))
        either = " | ".join(f"tool_{i}" for i in range(len(tools)))
        answer = answer_rules(text, CALLS, f"tool {more}", special)
        return f"{answer}\ntool: {either}\n{each}\n{arguments_rules(tools)}"

    def call_id(self, call_id: str, name: str = "", index: int = 0) -> str:
        return _short_id(call_id)


def _short_id(call_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "", call_id)[-ID_LENGTH:].rjust(ID_LENGTH, "0")


class MistralReader(CallReader):
    """Both formats; the text after the marker shows which one it is."""

    _arguments: ValueEnd | None = None  # arguments of a call in the newer format, while they arrive

    def _behind_marker(self) -> bool:
        rest = self._waiting.lstrip()
        if not rest and not self._is_last:
            return False
        if rest[:1] == "[":
            self._opening += self._waiting[: len(self._waiting) - len(rest) + 1]
            self._waiting = rest[1:]
            self._state = super()._behind_marker
            return True
        found = NAMED.match(rest)
        if found is None and len(rest) < MAX_NAME and not self._is_last:
            return False
        if found is None or found[1] not in self._names:
            self._was_text()
            return True
        self._parts.append(Part(PartKind.CALL, found[1]))
        self._has_called, self._waiting = True, rest[found.end() :]
        self._arguments, self._state = ValueEnd(), self._in_arguments
        return True

    def _in_arguments(self) -> bool:
        assert self._arguments is not None
        text, self._waiting = self._waiting, ""
        end = self._arguments.find(text)
        if piece := text[:end]:
            self._parts.append(Part(PartKind.ARGUMENTS, piece))
        if end is None:
            return False
        self._waiting, self._state = text[end:], self._in_text
        return True

    def _behind_call(self) -> bool:
        """In a list: another call, or its end."""
        rest = self._waiting.lstrip()
        if not rest and not self._is_last:
            return False
        self._opening, self._waiting = rest[:1], rest[1:]
        if self._opening == ",":
            self._state = super()._behind_marker
            return True
        if self._opening != "]":
            self._waiting = rest
        self._state = self._in_text
        return True
