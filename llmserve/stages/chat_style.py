"""How to read a checkpoint's answers to conversations, derived from its chat template: the formats of tool calls and
thoughts.

The preprocess step, which has the template, determines it and sends it as JSON to the readers of answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from llmserve.errors import InvalidArgument, raise_problems
from llmserve.stages import harmony
from llmserve.stages.answer_parts import Part, PartKind, PartReader
from llmserve.stages.reasoning import TAGS, ThoughtReader
from llmserve.stages.tool_formats.grammars import FREE_TEXT, json_rule, literal, marked, until
from llmserve.stages.tool_formats.registry import TOOL_FORMATS
from llmserve.stages.tool_formats.tool_format import Tool, ToolFormat

AUTO, NONE = "auto", "none"
ON_OFF = ("enable_thinking", "thinking")  # variables of templates that turn thoughts on or off
SWITCHES = (*ON_OFF, "reasoning_effort")  # and that set their amount
NO_THINK, THINK = "/no_think", "/think"  # the last switch counts
BLANKS = r"/[ \t\r\n]{1,8}/"  # between a thought and the answer


@dataclass(frozen=True, slots=True)
class ChatStyle:
    takes_tools: bool = False  # the template passes tools to the model
    tool_format: str = ""  # format of calls; empty: unknown
    reasoning: str = ""  # format of thoughts; empty: none or unknown
    is_open: bool = False  # a prompt ends inside a thought
    is_open_after_result: bool = False  # likewise, if the last message is a tool's
    obeys_words: bool = False  # except with NO_THINK in a message
    switches: Sequence[str] = ()  # the SWITCHES that the template reads
    special: Sequence[str] = ()  # markers that are special tokens
    tokenizer: Mapping[str, str] = field(default_factory=dict, hash=False)  # its class, special tokens and template

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ChatStyle:
        return cls(**json.loads(text))

    def told_by(self, messages: Sequence[Mapping[str, Any]]) -> ChatStyle:
        """For answers to a conversation that may end with a tool's result, or in which a user may have turned thoughts
        on or off."""
        if not self.is_open_after_result and any(each["role"] == "tool" for each in messages[-1:]):
            return replace(self, is_open=False)
        if not self.obeys_words:
            return self
        said = [str(each.get("content")) for each in messages if each["role"] in ("system", "user")]
        last = [text for text in said if NO_THINK in text or THINK in text][-1:]
        return self if all(THINK in text for text in last) else replace(self, is_open=False)

    @property
    def tools(self) -> ToolFormat | None:
        return TOOL_FORMATS.get(self.tool_format)

    @property
    def thought_markers(self) -> Sequence[str]:
        return thought_markers(self.reasoning)

    def reader(self, tools: Sequence[Tool], *, continues: bool = False) -> PartReader | None:
        """A reader for one answer that may call the tools; None if all of it is text. `continues`: the prompt ends with
        the beginning of the answer, after any thought."""
        if self.reasoning == harmony.NAME:
            return harmony.HarmonyReader(tools)
        tags = TAGS.get(self.reasoning)
        thoughts = ThoughtReader(tags, is_open=self.is_open) if tags and not continues else None
        calls = self.tools.reader(tools) if self.tools and tools else None
        return AnswerReader(thoughts, calls) if thoughts or calls else None


def thought_markers(reasoning: str) -> Sequence[str]:
    """Texts that mark thoughts in this format."""
    tags = TAGS.get(reasoning)
    return (tags.begin, tags.end) if tags else harmony.MARKERS if reasoning == harmony.NAME else ()


class AnswerReader:
    """Reads a thought, then text and calls."""

    def __init__(self, thoughts: ThoughtReader | None, calls: PartReader | None) -> None:
        self._thoughts = thoughts
        self._calls = calls

    def read(self, text: str, *, is_last: bool = False) -> list[Part]:
        parts: list[Part] = []
        if self._thoughts is not None:
            parts, text = self._thoughts.read(text, is_last=is_last)
        if self._calls is not None:
            return parts + self._calls.read(text, is_last=is_last)
        return [*parts, Part(PartKind.TEXT, text)] if text else parts


@dataclass(frozen=True, slots=True)
class Wanted:
    """Requirements on an answer."""

    tools: Sequence[Tool] = ()  # tools that may be called
    must_call: bool = False
    several: bool = True  # calls in one answer
    schema: Mapping[str, Any] | None = None  # schema of a text answer; None: any
    choices: Sequence[str] = ()  # texts of which a text answer must be one


def answer_guide(style: ChatStyle, wanted: Wanted, *, continues: bool = False) -> str:
    """A guide in Lark: a thought, if the model thinks, then an answer that meets the requirements."""
    form = " | ".join(map(literal, wanted.choices)) or (json_rule(wanted.schema) if wanted.schema is not None else "")
    text, rules = ("formatted", f"formatted: {form}\n") if form else (FREE_TEXT, "")
    if wanted.tools:
        assert style.tools is not None
        allowed = None if wanted.must_call else text
        answer = style.tools.rules(wanted.tools, allowed, several=wanted.several, special=style.special)
    elif style.reasoning == harmony.NAME and not continues:
        answer = harmony.Harmony().rules((), text, several=False, special=style.special)
    else:
        answer = f"answer: {text}"
    return f"{_start(style, continues)}\n{answer}\n{'' if wanted.must_call else rules}"


def _start(style: ChatStyle, continues: bool) -> str:
    if not style.reasoning or continues:
        return "start: answer"
    if style.reasoning == harmony.NAME:
        return harmony.start_rules(style.special)
    tags = TAGS[style.reasoning]
    thought = "\n".join(until("thought", FREE_TEXT, tags.end, style.special))
    if style.is_open:
        return f"start: thought {BLANKS}? answer\n{thought}"
    return f"start: ({marked(tags.begin, style.special)} thought {BLANKS}?)? answer\n{thought}"


def check_formats(tool_format: str, reasoning_format: str) -> None:
    """Check formats named in a config. Raises `InvalidArgument`."""
    rules = (
        ("tool_format", tool_format, [*TOOL_FORMATS]),
        ("reasoning_format", reasoning_format, [*TAGS, harmony.NAME]),
    )
    problems = [
        f"{key} is '{value}', which is not one of {', '.join((AUTO, NONE, *known))}"
        for key, value, known in rules
        if value not in (AUTO, NONE, *known)
    ]
    raise_problems(InvalidArgument, "the chat template cannot be read as configured", problems)
