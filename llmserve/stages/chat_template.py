"""A checkpoint's jinja chat template, rendered in a sandbox with the names that transformers gives to templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmserve.errors import CheckpointError, InvalidArgument

NO_VALUES: Mapping[str, Any] = MappingProxyType({})


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.filters["tojson"] = _to_json
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
            self.names = frozenset(meta.find_undeclared_variables(environment.parse(source)))  # that it reads
        except TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template has a syntax error in line {error.lineno}: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        more: Mapping[str, Any] = NO_VALUES,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt's text, with the opening of the assistant's answer unless the last message is the assistant's.

        `more`: names that the template may read besides; they do not replace those that it always has. `tools`: as
        OpenAI's API describes them.
        """
        values: dict[str, Any] = {
            **self._special_tokens,
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": messages[-1]["role"] != "assistant",
        }
        if taken := sorted(values.keys() & more.keys()):
            raise InvalidArgument(f"chat_template_kwargs must not have {', '.join(taken)}: the server says that")
        values |= more
        try:
            return self._template.render(values)
        except (TemplateError, TypeError, LookupError, ValueError, ArithmeticError, RecursionError) as error:
            raise InvalidArgument(f"the chat template refuses these messages: {error}") from error


def _raise_exception(message: str) -> None:
    """What templates call for messages that they were not made for."""
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(value: Any, indent: int | None = None) -> str:
    """As transformers has it: no HTML escapes, no `\\u` escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
