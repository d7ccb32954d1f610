"""Formats with a marker on each side of a call, whose arguments are JSON: DeepSeek's (V3 and R1, then V3.1), Kimi K2's.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather    or weather<｜tool▁sep｜>{"city": "Rome"}
```json
{"city": "Rome"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Rome"}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from llmserve.stages.answer_parts import Part, PartKind, PartReader
from llmserve.stages.stop_strings import num_held
from llmserve.stages.tool_formats.grammars import answer_rules, arguments_rules, literal, spelled
from llmserve.stages.tool_formats.json_calls import CallReader, ValueEnd
from llmserve.stages.tool_formats.tool_format import Tool

MAX_HEAD = 300  # characters within which a call's arguments begin
FENCE = "```"


@dataclass(frozen=True, slots=True)
class MarkedCalls:
    name: str
    begin: str  # around all calls
    end: str
    call: tuple[str, str]  # around each
    inner: str  # the marker inside a call
    shape: tuple[str, str, str]  # around the tool's name and the arguments
    head: re.Pattern[str]  # what models write before the arguments
    between: str = ""  # calls
    has_index: bool = False  # after the name: the number of the call in the conversation

    @property
    def markers(self) -> Sequence[str]:
        return (self.begin, self.end, *self.call, self.inner)

    @property
    def how(self) -> str:
        """For a system message, if a template does not describe tools."""
        before, behind, after = self.shape
        one = f"{self.call[0]}{before}NAME{behind}ARGUMENTS{after}{self.call[1]}"
        return (
            "To call functions, write exactly this, with the function's name for NAME and a JSON object that follows "
            f"its parameters for ARGUMENTS:\n{self.begin}{one}{self.end}\n"
            f"For more calls, repeat the part from {self.call[0]} to {self.call[1]}."
        )

    def reader(self, tools: Sequence[Tool]) -> PartReader:
        return MarkedReader([tool.name for tool in tools], self)

    def rules(self, tools: Sequence[Tool], text: str | None, *, several: bool, special: Collection[str]) -> str:
        before, behind, after = self.shape
        head, middle, tail = self.call[0] + before, spelled(behind, special), spelled(after + self.call[1], special)
        index = '":" /[0-9]{1,3}/ ' if self.has_index else ""
        each = [
            f"tool_{i}: {spelled(head + tool.name, special)} {index}{middle} args_{i} {tail}"
            for i, tool in enumerate(tools)
        ]
        # The line break is optional: with it, a guide does not enforce the characters with which both the next marker
        # and the last one begin, one by one, where markers are no special tokens.
        more = f"({literal(self.between)} tool)*" if self.between else '("\\n"? tool)*'
        body = f"tool {more if several else ''} {spelled(self.end, special)}"
        either = " | ".join(f"tool_{i}" for i in range(len(tools)))
        answer = answer_rules(text, self.begin, body, special)
        return "\n".join([answer, f"tool: {either}", *each, arguments_rules(tools)])

    def call_id(self, call_id: str, name: str = "", index: int = 0) -> str:
        return f"functions.{name}:{index}" if self.has_index and name else call_id


class MarkedReader(CallReader):
    """Arguments end with their object or, if that is broken, at the next marker."""

    def __init__(self, names: Collection[str], form: MarkedCalls) -> None:
        super().__init__(names, form.begin, form.call[0])  # some models forget the first
        self._form = form
        self._arguments: ValueEnd | None = None  # while they arrive

    def _behind_marker(self) -> bool:
        begin = self._form.call[0]
        waiting = begin + self._waiting if self._opening.endswith(begin) else self._waiting.lstrip()
        found = self._form.head.match(waiting)
        if found is None and len(self._waiting) < MAX_HEAD and not self._is_last:
            return False
        if found is None or found[1] not in self._names:
            self._was_text()
            return True
        self._parts.append(Part(PartKind.CALL, found[1]))
        self._has_called, self._opening, self._waiting = True, "", waiting[found.end() :]
        self._arguments, self._state = ValueEnd(), self._in_arguments
        if not self._waiting.startswith("{"):
            self._parts.append(Part(PartKind.ARGUMENTS, "{}"))
            self._state = self._behind_call
        return True

    def _in_arguments(self) -> bool:
        assert self._arguments is not None
        ends = (self._form.call[1], self._form.end)
        marker = min((place for each in ends if (place := self._waiting.find(each)) >= 0), default=None)
        kept = num_held(self._waiting, ends) if marker is None and not self._is_last else 0
        text = self._waiting[:marker] if marker is not None else self._waiting[: len(self._waiting) - kept]
        end = self._arguments.find(text)
        if piece := text[:end]:
            self._parts.append(Part(PartKind.ARGUMENTS, piece))
        self._waiting = self._waiting[len(piece) :]
        if end is None and marker is None:
            return False
        self._state = self._behind_call
        return True

    def _behind_call(self) -> bool:
        """The end of the call and perhaps of all, unless the model has forgotten it; or another call."""
        rest = self._waiting.lstrip()
        for each in (FENCE, self._form.call[1]):
            if rest != each and each.startswith(rest) and not self._is_last:
                return False
            rest = rest.removeprefix(each).lstrip()
        if rest != self._form.end and self._form.end.startswith(rest) and not self._is_last:
            return False
        self._waiting, self._state = rest.removeprefix(self._form.end), self._in_text
        return True


SEP, ARGUMENTS = "<｜tool▁sep｜>", "<|tool_call_argument_begin|>"
DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
KIMI_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
DEEPSEEK_HEAD = re.compile(  # both shapes: models mix them
    rf"{DEEPSEEK_CALL[0]}\s*(?:function\s*{SEP}\s*)?([^\s<`{{]+)\s*(?:{SEP}\s*)?"
    rf"(?:```(?:json)?\s*(?=\{{|```)|(?=\{{|{DEEPSEEK_CALL[1]}))"
)
KIMI_HEAD = re.compile(
    "{}{}{}{}".format(
        re.escape(KIMI_CALL[0]), r"\s*(?:functions\.)?([^\s<]+?)(?::\d+)?\s*", re.escape(ARGUMENTS),
        rf"\s*(?=\{{|{re.escape(KIMI_CALL[1])})",
    )
)  # fmt: skip
DEEPSEEK_V3 = MarkedCalls(
    "deepseek_v3", *DEEPSEEK, DEEPSEEK_CALL, SEP, (f"function{SEP}", "\n```json\n", "\n```"), DEEPSEEK_HEAD, "\n",
)  # fmt: skip
DEEPSEEK_V31 = MarkedCalls("deepseek_v31", *DEEPSEEK, DEEPSEEK_CALL, SEP, ("", SEP, ""), DEEPSEEK_HEAD)
KIMI_K2 = MarkedCalls(
    "kimi_k2", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", KIMI_CALL, ARGUMENTS,
    ("functions.", ARGUMENTS, ""), KIMI_HEAD, has_index=True,
)  # fmt: skip
