"""The tools of a request: functions that the model may ask its client to call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, JsonValue

from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.text.answers.failures import Refused
from llmserve.frontends.text.requests.formats import SCHEMAS_BY_NAME, closed
from llmserve.frontends.text.requests.validation import Strict
from llmserve.stages.tool_formats.tool_format import Tool

MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 256 * 1024  # of all tools, as JSON: they are checked on the event loop
MAX_DEPTH = 64  # of nested schemas
TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
SCHEMA_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")

ToolName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
Schema: TypeAlias = dict[str, JsonValue]


class Function(Strict):
    name: ToolName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = Field(None, description="The arguments always match the schema.")

    def document(self) -> dict[str, Json]:
        """The function's description for the chat template."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.schema_()}}

    def schema_(self) -> Schema:
        return self.parameters or {"type": "object", "properties": {}}


class FunctionTool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Tools: TypeAlias = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)]
Mode: TypeAlias = Literal["none", "auto", "required"]
ToolChoice: TypeAlias = Mode | Annotated[NamedTool | AllowedChoice, Field(discriminator="type")]


@dataclass(frozen=True, slots=True)
class Choice:
    """Which tools the model may call, and whether it must call one."""

    mode: Mode = "auto"
    names: Sequence[str] | None = None  # None: all
    is_one: bool = False  # exactly one call of the named tool


@dataclass(frozen=True, slots=True)
class ToolUse:
    functions: Sequence[Function] = ()  # functions that may be called
    given: Sequence[Function] = ()  # functions that the model sees
    must_call: bool = False
    several: bool = True  # whether an answer may have several calls

    @property
    def is_enforced(self) -> bool:
        """Whether a guide must enforce these rules. Otherwise calls are only detected in answers."""
        return bool(self.functions) and (
            self.must_call or not self.several or any(each.strict for each in self.functions)
            or len(self.functions) < len(self.given)
        )  # fmt: skip

    def documents(self) -> list[dict[str, Json]]:
        return [each.document() for each in self.given]

    def tools(self) -> list[Tool]:
        return [Tool(each.name, closed(each.schema_()) if each.strict else each.schema_()) for each in self.functions]


def chosen(choice: ToolChoice | None) -> Choice:
    """The choice in a request to OpenAI's chat completions."""
    if choice is None or isinstance(choice, str):
        return Choice(choice or "auto")
    if isinstance(choice, NamedTool):
        return Choice("required", [choice.function.name], is_one=True)
    allowed = choice.allowed_tools
    return Choice(allowed.mode, [each.function.name for each in allowed.tools])


def tool_use(functions: Sequence[Function], choice: Choice, *, several: bool | None) -> ToolUse:
    """Raises `Refused` with all problems. If the mode is none, no tools are passed to the model."""
    if (size := len(json.dumps([each.parameters for each in functions]))) > MAX_SCHEMA_BYTES:
        raise Refused(f"tools: their parameters have {size} bytes of JSON; the maximum is {MAX_SCHEMA_BYTES}", "tools")
    names = [each.name for each in functions]
    twice = list(dict.fromkeys(name for name in names if names.count(name) > 1))
    problems = [f"tools: duplicate name '{name}'" for name in twice]
    for each in functions:
        problems += [f"tools: the parameters of '{each.name}' {problem}" for problem in _problems(each.schema_())]
    param = "tools"
    if not problems:
        param = "tool_choice"
        wanted = choice.names or []
        problems = [f"tool_choice: no tool in tools is named '{name}'" for name in wanted if name not in names]
        if choice.mode == "required" and not functions:
            problems.append("tool_choice requires a call, but there are no tools")
    if problems:
        raise Refused("; ".join(dict.fromkeys(problems)), param)
    if choice.mode == "none":
        return ToolUse()
    callable_ = [each for each in functions if choice.names is None or each.name in choice.names]
    return ToolUse(callable_, functions, choice.mode == "required", several is not False and not choice.is_one)


def _problems(schema: Mapping[str, Any]) -> list[str]:
    """The reasons why this is not the schema of an object. Schemas that guides do not support are refused later."""
    if schema.get("type", "object") != "object":
        return ['must have the type "object"']
    try:
        return list(dict.fromkeys(_schema_problems(schema, 0)))
    except RecursionError:
        return [f"are nested too deeply: more than {MAX_DEPTH} levels"]


def _schema_problems(schema: Any, depth: int) -> list[str]:
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(schema, bool):
        return []
    if not isinstance(schema, dict):
        return [f"have {_shown(schema)} where a schema is expected"]
    found = []
    kind = schema.get("type", [])
    kinds = kind if isinstance(kind, list) else [kind]
    found += [f"have an unknown type: {_shown(one)}" for one in kinds if one not in TYPES]
    required, choices = schema.get("required", []), schema.get("enum", [None])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        found.append("need a list of names in required")
    if not isinstance(choices, list) or not choices:
        found.append("need a list of values in enum")
    inner = [schema[key] for key in SCHEMAS if key in schema and not isinstance(schema[key], list)]
    for key in SCHEMAS_BY_NAME:
        named = schema.get(key, {})
        inner += named.values() if isinstance(named, dict) else [named]
    for key in SCHEMA_LISTS:
        listed = schema.get(key, [])
        inner += listed if isinstance(listed, list) else [listed]
    return found + [problem for each in inner for problem in _schema_problems(each, depth + 1)]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 50 else f"{text[:50]}..."
