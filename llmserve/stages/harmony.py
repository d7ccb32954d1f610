"""Harmony, the format of gpt-oss's answers: messages in channels. Thoughts are in `analysis`, tool calls in
`commentary`, the answer in `final`.

<|channel|>analysis<|message|>I need the weather.<|end|><|start|>assistant<|channel|>commentary to=functions.weather
<|constrain|>json<|message|>{"city": "Rome"}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from llmserve.stages.answer_parts import Part, PartKind, PartReader
from llmserve.stages.stop_strings import num_held
from llmserve.stages.tool_formats.grammars import FREE_TEXT, arguments_rules, literal, marked, until
from llmserve.stages.tool_formats.tool_format import Tool

NAME = "harmony"
CHANNEL, MESSAGE, START, END, CALL = "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>"
CONSTRAIN, RETURN = "<|constrain|>", "<|return|>"
MARKERS = (CHANNEL, MESSAGE, START, END, CALL, CONSTRAIN, RETURN)
ENDS = (END, CALL, RETURN, START, CHANNEL)  # ends of a message; the last two if a model forgot the end
HEADS = (CHANNEL, START, " to=", "to=", "assistant", MESSAGE)  # possible beginnings of an answer
IN_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
UNREAD = re.compile("|".join(map(re.escape, (END, CALL, RETURN, START))))  # in front of the last head
MAX_HEAD = 400  # characters in front of a message
MAX_WORDS = 6  # of a head: a longer, unfinished one is text about a marker


@dataclass(frozen=True, slots=True)
class Harmony:
    """Its tool calls. Whole answers are read and guided here, too: see `ChatStyle`."""

    name: str = NAME
    markers: Sequence[str] = MARKERS

    def reader(self, tools: Sequence[Tool]) -> PartReader:
        return HarmonyReader(tools)

    def rules(self, tools: Sequence[Tool], text: str | None, *, several: bool, special: Collection[str]) -> str:
        """Only one call, whatever `several` says, because its token ends the answer."""
        channel, message = marked(CHANNEL, special), marked(MESSAGE, special)
        final = f"\nfinal: {channel} {literal('final')} {message} {text}" if text is not None else ""
        if not tools:
            return f"answer: final{final}"
        head = f"{channel} {literal('commentary to=functions.')} tool"
        tail = f'" "? {marked(CONSTRAIN, special)} "json" {message}'
        each = "\n".join(f"tool_{i}: {literal(tool.name)} {tail} args_{i}" for i, tool in enumerate(tools))
        either = " | ".join(f"tool_{i}" for i in range(len(tools)))
        answer = f"answer: call{' | final' if final else ''}{final}"
        return f"{answer}\ncall: {head}\ntool: {either}\n{each}\n{arguments_rules(tools)}"

    def call_id(self, call_id: str, name: str = "", index: int = 0) -> str:
        return call_id


def start_rules(special: Collection[str]) -> str:
    """Rules of a guide: a thought may come before the answer."""
    thought = "\n".join(until("thought", FREE_TEXT, END, special))
    head = f"{marked(CHANNEL, special)} {literal('analysis')} {marked(MESSAGE, special)}"
    return f'start: ({head} thought {marked(START, special)} "assistant")? answer\n{thought}'


class HarmonyReader:
    """Reads one answer, with or without tools. An answer without channels is text."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._names = {tool.name for tool in tools}
        self._waiting = ""
        self._kind: PartKind | None = None  # channel of the current message; None: its head is next
        self._has_begun = False
        self._needs_break: dict[PartKind, bool] = {}  # parts that were returned: whether another message begins
        self._has_arguments = True

    def read(self, text: str, *, is_last: bool = False) -> list[Part]:
        self._waiting += text
        parts: list[Part] = []
        while self._head(parts, is_last) if self._kind is None else self._body(parts, is_last):
            pass
        return parts

    def _head(self, parts: list[Part], is_last: bool) -> bool:
        if not self._has_begun and not self._may_be_head():
            self._kind = PartKind.TEXT
            return True
        place = self._waiting.find(MESSAGE, 0, MAX_HEAD)
        if place < 0:
            return self._no_head(parts, is_last)
        head = UNREAD.split(self._waiting[:place])[-1]
        self._waiting = self._waiting[place + len(MESSAGE) :]
        channel, recipient = IN_CHANNEL.search(head), RECIPIENT.search(head)
        self._has_begun = True
        if recipient is not None and recipient[1] in self._names:
            self._kind, self._has_arguments = PartKind.ARGUMENTS, False
            parts.append(Part(PartKind.CALL, recipient[1]))
        else:
            is_thought = channel is not None and channel[1] == "analysis"
            self._kind = PartKind.THOUGHT if is_thought else PartKind.TEXT
        return True

    def _no_head(self, parts: list[Part], is_last: bool) -> bool:
        """The waiting text is the beginning of a head, or not one."""
        is_short = len(self._waiting) < MAX_HEAD
        if is_short and not is_last:
            return False
        marker = next((each for each in (START, CHANNEL) if self._waiting.startswith(each)), "")
        if is_short and (self._has_begun or marker) and len(self._waiting.split()) <= MAX_WORDS:
            self._waiting = ""
            return False
        self._kind = PartKind.TEXT
        self._tell(parts, self._kind, marker)  # if it stayed, it would end the text where it begins
        self._waiting = self._waiting.removeprefix(marker)
        return True

    def _may_be_head(self) -> bool:
        return any(self._waiting.startswith(head) or head.startswith(self._waiting) for head in HEADS)

    def _body(self, parts: list[Part], is_last: bool) -> bool:
        assert self._kind is not None
        found = [(place, end) for end in ENDS if (place := self._waiting.find(end)) >= 0]
        if not found:
            kept = 0 if is_last else num_held(self._waiting, ENDS)
            self._tell(parts, self._kind, self._waiting[: len(self._waiting) - kept])
            self._waiting = self._waiting[len(self._waiting) - kept :]
            return False
        place, end = min(found)
        self._tell(parts, self._kind, self._waiting[:place])
        self._waiting = self._waiting[place if end in (START, CHANNEL) else place + len(end) :]
        if not self._has_arguments:
            self._tell(parts, PartKind.ARGUMENTS, "{}")
        if self._kind in self._needs_break:
            self._needs_break[self._kind] = True
        self._kind, self._has_begun = None, True
        return True

    def _tell(self, parts: list[Part], kind: PartKind, text: str) -> None:
        if not text:
            return
        self._has_arguments = self._has_arguments or bool(text.strip())
        if self._needs_break.get(kind) and kind is not PartKind.ARGUMENTS:
            text = f"\n\n{text}"
        self._needs_break[kind] = False
        parts.append(Part(kind, text))
