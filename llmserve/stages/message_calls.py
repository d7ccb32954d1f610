"""Tool calls in messages: their arguments as an object, or as JSON for templates that join it to other text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from llmserve.errors import InvalidArgument


def tool_call(call: Any) -> Mapping[str, Any]:
    """A call with its arguments as an object, as templates expect; OpenAI's API has them as JSON. Invalid JSON stays as
    it is."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidArgument('messages cannot be used: each tool call must have a "function" with a "name"')
    arguments = function.get("arguments", {})
    made = arguments
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            made = json.loads(arguments or "{}", strict=False)
        made = made if isinstance(made, dict) else arguments
    if not isinstance(made, dict | str):
        problem = f"the arguments of a call of {function['name']} are not a JSON object"
        raise InvalidArgument(f"messages cannot be used: {problem}")
    return {"type": "function", **call, "function": {**function, "arguments": made}}


def with_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """A call with its arguments as JSON again."""
    function, arguments = call["function"], call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
