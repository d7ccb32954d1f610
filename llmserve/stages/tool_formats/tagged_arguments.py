"""Formats with separate tags for each argument of a call: Qwen3-Coder's (and Seed-OSS's), GLM-4.5's, MiniMax-M2's.

<tool_call>                     <tool_call>weather              <minimax:tool_call>
<function=weather>              <arg_key>city</arg_key>         <invoke name="weather">
<parameter=city>                <arg_value>Rome</arg_value>     <parameter name="city">Rome</parameter>
Rome                            </tool_call>                    </invoke>
</parameter>                                                    </minimax:tool_call>
</function>
</tool_call>

A value is plain text or JSON, depending on the tool's schema. Guides enforce choices and lengths of a text, but not a
pattern or format.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llmserve.stages.answer_parts import Part, PartKind, PartReader
from llmserve.stages.tool_formats.grammars import FREE_TEXT, answer_rules, json_rule, literal, spelled, until
from llmserve.stages.tool_formats.json_calls import CallReader
from llmserve.stages.tool_formats.tool_format import Tool

MAX_HEAD = 300  # characters within which a call's name is known
MAX_BLANKS = 8  # between the ends of a call
MAX_COUNTED = 1000  # characters of a text: a guide that counts further is slow to compile
JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "object": (dict,),
    "array": (list,), "null": (type(None),),
}  # fmt: skip
MAX_LITERAL = 10_000  # characters of a value as Python spells it: older templates of Qwen3-Coder and Seed-OSS do


@dataclass(frozen=True)
class TaggedArguments:
    name: str
    begin: str
    end: str
    call: tuple[str, str]  # around a tool's name
    call_end: str  # empty: `end` itself
    key: tuple[str, str]  # around an argument's name
    value: tuple[str, str]  # around its value, with the line breaks that belong to neither
    separate: bool = True  # each call has its own `begin`
    tags: Sequence[str] = ()  # beside `begin` and `end`: of which some are tokens

    @property
    def markers(self) -> Sequence[str]:
        return (self.begin, self.end, *self.tags)

    def reader(self, tools: Sequence[Tool]) -> PartReader:
        return TaggedReader(tools, self)

    def call_id(self, call_id: str, name: str = "", index: int = 0) -> str:
        return call_id

    @cached_property
    def head(self) -> re.Pattern[str]:
        before, after = map(re.escape, self.call)
        return re.compile(rf'\s*{before}([^\s<>"]+)' + (after or r"(?=\s*<)"))

    @cached_property
    def opening(self) -> re.Pattern[str]:
        before, after = map(re.escape, self.key)
        value = self.value[0].strip()
        return re.compile(rf"{before}([^<>\n]+?){after}" + (rf"\s*{re.escape(value)}" if value else ""))

    def ending(self, names: Collection[str]) -> re.Pattern[str]:
        """The end of a value: its tag or, if a model has forgotten that, the next argument at the start of a line, or
        the end of the call and what follows it."""
        begin, end, call_end, value_end = map(re.escape, (self.call[0], self.end, self.call_end, self.value[1].strip()))
        before, after = map(re.escape, self.key)
        either = [value_end]
        either += [rf"\n(?={before}(?:{'|'.join(map(re.escape, names))}){after})"] if names else []
        either += [rf"\n?(?={call_end}\s{{0,{MAX_BLANKS}}}(?:{end}|{begin}))"] if call_end else []
        return re.compile("|".join(either))

    def rules(self, tools: Sequence[Tool], text: str | None, *, several: bool, special: Collection[str]) -> str:
        begin, end = spelled(self.begin, special), spelled(self.end, special)
        if self.separate:
            one = f'"\\n"? tool {end}' if self.call_end else f"tool {end}"
            body = f'{one} ("\\n" {begin} {one})*' if several else one
        else:
            body = f'"\\n" tool {"tool*" if several else ""} {end}'
        each = [line for i, tool in enumerate(tools) for line in self._tool_rules(i, tool, special)]
        either = " | ".join(f"tool_{i}" for i in range(len(tools)))
        return "\n".join([answer_rules(text, self.begin, body, special), f"tool: {either}", *each])

    def _tool_rules(self, i: int, tool: Tool, special: Collection[str]) -> Iterator[str]:
        """Arguments in the schema's order. Tools without named arguments accept any."""
        named: Mapping[str, Any] = tool.parameters.get("properties") or {}
        required = tool.parameters.get("required", ())
        listed = [f"arg_{i}_{j}{'' if key in required else '?'}" for j, key in enumerate(named)]
        head = spelled("".join((self.call[0], tool.name, self.call[1])), special)
        tail = spelled(f"{self.call_end}\n", special) if self.call_end else ""
        yield f'tool_{i}: {head} "\\n"? {" ".join(listed)} {tail}'
        for j, (key, schema) in enumerate(named.items()):
            before = spelled("".join((self.key[0], key, self.key[1], self.value[0])), special)
            yield f'arg_{i}_{j}: {before} value_{i}_{j} "\\n"?'
            yield from self._value_rules(f"value_{i}_{j}", resolved(schema, tool.parameters), tool, special)

    def _value_rules(self, rule: str, schema: Any, tool: Tool, special: Collection[str]) -> Iterator[str]:
        end = spelled(self.value[1], special)
        choices = schema.get("enum", [schema["const"]] if "const" in schema else []) if isinstance(schema, dict) else []
        if choices:
            texts = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in choices]
            yield f"{rule}: ({' | '.join(map(literal, texts))}) {end}"
        elif "string" in types_of(schema, tool.parameters):
            yield from until(rule, _text_pattern(schema), self.value[1], special)
        else:
            shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
            yield f"{rule}: {rule}_json {end}"
            yield f"{rule}_json: {json_rule({**shared, **schema} if isinstance(schema, dict) else {})}"


def _text_pattern(schema: Any) -> str:
    most, least = (schema.get(key) for key in ("maxLength", "minLength")) if isinstance(schema, dict) else (None, None)
    if all(each is None or (isinstance(each, int) and 0 <= each <= MAX_COUNTED) for each in (least, most)):
        return rf"/(.|\n){{{least or 0},{'' if most is None else most}}}/"
    return FREE_TEXT


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Follows references to other places of `root`."""
    for _ in range(len(root) + 8):  # a reference to itself leads nowhere
        if not isinstance(schema, dict) or not str(schema.get("$ref", "")).startswith("#/"):
            return schema
        found: Any = root
        for step in schema["$ref"].removeprefix("#/").split("/"):
            found = found.get(step) if isinstance(found, dict) else None
        schema = found
    return None


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 8) -> set[str]:
    """Types that a value may have; any type if the schema does not say."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or not depth:
        return set(JSON_TYPES)
    if choices := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return {name for name, kinds in JSON_TYPES.items() for each in choices if type(each) in kinds}
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return {kind for each in schema[key] for kind in types_of(each, root, depth - 1)}
    kinds = schema.get("type", list(JSON_TYPES))
    found = set(kinds if isinstance(kinds, list) else [kinds])
    found |= {"integer"} if "number" in found else set()
    return found.intersection(*(types_of(each, root, depth - 1) for each in schema.get("allOf", ())))


def argument(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """A value as JSON. Text that matches none of the schema's types stays text."""
    kinds = types_of(schema, root) - {"string"}
    value = _value(text) if kinds else text
    if isinstance(value, float) and value.is_integer() and "number" not in kinds:
        value = int(value)  # JSON Schema's integers include 5.0
    if not any(type(value) in JSON_TYPES.get(kind, ()) for kind in kinds):
        value = text
    return json.dumps(value, ensure_ascii=False)


def _value(text: str) -> Any:
    """As JSON, or in Python's spelling."""
    parsers: list[Callable[[str], Any]] = [json.loads]
    parsers += [ast.literal_eval] if len(text) <= MAX_LITERAL else []
    for parse in parsers:
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            value = parse(text.strip())
            json.dumps(value, allow_nan=False)
            return value
    return text


class TaggedReader(CallReader):
    """Arguments are returned one by one, when each is complete."""

    def __init__(self, tools: Sequence[Tool], form: TaggedArguments) -> None:
        super().__init__([tool.name for tool in tools], *filter(None, (form.begin, form.call[0])))
        self._form = form
        self._tools = {tool.name: tool.parameters for tool in tools}
        self._parameters: Mapping[str, Any] = {}  # the schema of the current call
        self._told: list[str] = []  # names of its arguments
        self._key = ""
        self._ending = form.ending(())
        self._num_searched = 0  # characters of a value without its end
        self._num_again = 0  # how many of these an incomplete end may have

    def _behind_marker(self) -> bool:
        begin = self._form.call[0]
        waiting = begin + self._waiting if begin and self._opening.endswith(begin) else self._waiting
        found = self._form.head.match(waiting)
        if found is None and len(self._waiting) < MAX_HEAD and not self._is_last:
            return False
        if found is None or found[1] not in self._tools:
            self._was_text()
            return True
        self._parts.append(Part(PartKind.CALL, found[1]))
        self._parameters, self._told, self._has_called = self._tools[found[1]], [], True
        names = [*(self._parameters.get("properties") or {})]
        self._ending, self._num_again = self._form.ending(names), 64 + max(map(len, names), default=0)
        self._waiting, self._state = waiting[found.end() :], self._between_arguments
        return True

    def _between_arguments(self) -> bool:
        rest, end = self._waiting.lstrip(), self._form.call_end or self._form.end
        if found := self._form.opening.match(rest):
            self._key, self._waiting, self._num_searched = found[1], rest[found.end() :], 0
            self._state = self._in_value
            return True
        others = (self._form.end, self._form.begin, self._form.call[0] or end)  # if a model has forgotten the end
        if not rest.startswith((end, *others)) and (self._is_last or len(rest) < MAX_HEAD):
            self._waiting = "" if self._is_last else rest
            return False
        self._tell_arguments("{}" if not self._told else "}")
        self._waiting, self._state = rest.removeprefix(end), self._behind_call
        return True

    def _in_value(self) -> bool:
        found = self._ending.search(self._waiting, max(0, self._num_searched - self._num_again))
        if found is None:
            self._num_searched = len(self._waiting)
            return False
        text = self._waiting[: found.start()]
        if self._form.value[1].startswith("\n"):
            text = text.removeprefix("\n").removesuffix("\n")
        if self._key not in self._told:
            schema = (self._parameters.get("properties") or {}).get(self._key)
            lead = ", " if self._told else "{"
            value = argument(text, schema, self._parameters)
            self._tell_arguments(f"{lead}{json.dumps(self._key, ensure_ascii=False)}: {value}")
            self._told.append(self._key)
        self._waiting, self._state = self._waiting[found.end() :], self._between_arguments
        return True

    def _behind_call(self) -> bool:
        """Another call in the same tags, or their end, unless the model has forgotten it."""
        rest, end, begin = self._waiting.lstrip(), self._form.end, self._form.call[0]
        if begin and rest.startswith(begin):
            self._opening, self._waiting, self._state = "", rest, self._behind_marker
            return True
        if rest != end and (end.startswith(rest) or begin.startswith(rest)) and not self._is_last:
            return False
        self._waiting, self._state = rest.removeprefix(end), self._in_text
        return True

    def _tell_arguments(self, text: str) -> None:
        self._parts.append(Part(PartKind.ARGUMENTS, text))


QWEN3_CODER = TaggedArguments(
    "qwen3_coder", "<tool_call>", "</tool_call>", call=("<function=", ">"), call_end="</function>",
    key=("<parameter=", ">"), value=("\n", "\n</parameter>"),
)  # fmt: skip
SEED_OSS = TaggedArguments(
    "seed_oss", "<seed:tool_call>", "</seed:tool_call>", call=("<function=", ">"), call_end="</function>",
    key=("<parameter=", ">"), value=("", "</parameter>"),
)  # fmt: skip
GLM45 = TaggedArguments(
    "glm45", "<tool_call>", "</tool_call>", call=("", ""), call_end="", key=("<arg_key>", "</arg_key>"),
    value=("\n<arg_value>", "</arg_value>"), tags=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)  # fmt: skip
MINIMAX_M2 = TaggedArguments(
    "minimax_m2", "<minimax:tool_call>", "</minimax:tool_call>", call=('<invoke name="', '">'), call_end="</invoke>",
    key=('<parameter name="', '">'), value=("", "</parameter>"), separate=False,
)  # fmt: skip
