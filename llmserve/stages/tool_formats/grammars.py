"""Rules of guides, in llguidance's Lark, that several forms of tool calls share."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from llmserve.stages.tool_formats.tool_format import Tool

FREE_TEXT = r"/(.|\n)*/"
WHITE_SPACE = r"[ \t\n\r]{1,16}"  # between the tokens of JSON, at most: models that find no end of it are led on
SPELLED = re.compile(r"<[^<>\s]+>")


def special_name(spelling: str) -> str:
    """How a guide names a special token: as it is spelled, in brackets if it has none."""
    return spelling if SPELLED.fullmatch(spelling) else f"<|{spelling}|>"


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def marked(marker: str, special: Collection[str]) -> str:
    return special_name(marker) if marker in special else literal(marker)


def json_rule(schema: Mapping[str, Any]) -> str:
    """A value that follows the schema."""
    options = {"x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    return f"%json {json.dumps({**schema, **options}, ensure_ascii=False)}"


def tool_rules(tools: Sequence[Tool], member: str) -> str:
    """`tool`: an object with a name and, in `member`, arguments."""
    end = literal("}")
    heads = [literal(f'{{"name": {json.dumps(tool.name)}, "{member}": ') for tool in tools]
    each = [f"tool_{i}: {head} args_{i} {end}" for i, head in enumerate(heads)]
    either = " | ".join(f"tool_{i}" for i in range(len(tools)))
    return "\n".join([f"tool: {either}", *each, arguments_rules(tools)])


def arguments_rules(tools: Sequence[Tool]) -> str:
    """`args_0` and so on. A schema is whole in its rule: what it refers to are parts of itself."""
    return "\n".join(f"args_{i}: {json_rule({'type': 'object', **tool.parameters})}" for i, tool in enumerate(tools))
