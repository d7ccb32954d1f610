"""Rules of guides, in llguidance's Lark, that several formats of tool calls share."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from llmserve.errors import InvalidArgument
from llmserve.stages.endless_schemas import endless_problem
from llmserve.stages.tool_formats.tool_format import Tool

FREE_TEXT = r"/(.|\n)*/"
WHITE_SPACE = r"[ \t\n\r]{1,16}"  # most white space between the tokens of JSON: some models would never end it
SPELLED = re.compile(r"<[^<>\s]+>")


def special_name(spelling: str) -> str:
    """The name of a special token in a guide: its spelling, in brackets if it has none."""
    return spelling if SPELLED.fullmatch(spelling) else f"<|{spelling}|>"


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def marked(marker: str, special: Collection[str]) -> str:
    return special_name(marker) if marker in special else literal(marker)


def json_rule(schema: Mapping[str, Any]) -> str:
    """A value that follows the schema. Raises `InvalidArgument` where none has an end."""
    if problem := endless_problem(schema):
        raise InvalidArgument(f"a JSON schema cannot be followed: {problem}")
    options = {"x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    return f"%json {json.dumps({**schema, **options}, ensure_ascii=False)}"


def spelled(text: str, special: Collection[str]) -> str:
    """A fixed text in which some markers are special tokens."""
    if not special:
        return literal(text)
    parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text)
    return " ".join(marked(part, special) for part in parts if part)


def until(rule: str, text: str, end: str, special: Collection[str]) -> Iterator[str]:
    """A rule for any text that matches a regular expression, up to its first end."""
    marker = next((each for each in special if each in end), None)
    terminal = rule.upper()
    yield f"{terminal}: {text}"
    yield f"{rule}: {terminal} {spelled(end, special)}" if marker else f"{rule}[lazy]: {terminal} {literal(end)}"


def answer_rules(text: str | None, begin: str, body: str, special: Collection[str]) -> str:
    """`answer`: calls, which start with a marker; or `text`, which calls may follow if it is free."""
    marker = marked(begin, special)
    if text != FREE_TEXT:
        return f"answer: calls{'' if text is None else f' | {text}'}\ncalls: {marker} {body}"
    lead = f"lead: TEXT {marker}" if begin in special else f"lead[lazy]: TEXT {marker}"
    return f"answer: TEXT | lead {body}\nTEXT: {FREE_TEXT}\n{lead}"


def tool_rules(tools: Sequence[Tool], member: str) -> str:
    """`tool`: an object with a name and, in `member`, arguments."""
    end = literal("}")
    heads = [literal(f'{{"name": {json.dumps(tool.name)}, "{member}": ') for tool in tools]
    each = [f"tool_{i}: {head} args_{i} {end}" for i, head in enumerate(heads)]
    either = " | ".join(f"tool_{i}" for i in range(len(tools)))
    return "\n".join([f"tool: {either}", *each, arguments_rules(tools)])


def arguments_rules(tools: Sequence[Tool]) -> str:
    """`args_0` and so on. A schema is complete in its rule: its references are parts of itself."""
    return "\n".join(f"args_{i}: {json_rule({'type': 'object', **tool.parameters})}" for i, tool in enumerate(tools))
