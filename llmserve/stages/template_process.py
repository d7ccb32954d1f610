"""The process in which a chat template is compiled and rendered: jinja's sandbox, with transformers' variables for
templates. `ChatTemplate` starts it and writes lines of JSON to it: the template, then values for it.

Compiling a template also computes: jinja evaluates constant expressions. One long operation, such as a format
with a width of a billion, cannot be interrupted from Python, so the kernel ends the process (SIGPROF).
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_WORK_S = 2.0  # of processor time per line; a conversation of 8,000 messages takes a tenth of a second
MAX_MEMORY_BYTES = 512 << 20  # of the process
MAX_TEXT = 16 << 20  # characters
MAX_PROBLEM = 500


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    renderer = Renderer()
    for line in iter(sys.stdin.buffer.readline, b""):
        signal.setitimer(signal.ITIMER_PROF, MAX_WORK_S)
        answer = renderer.answer(line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


class Generation(Extension):
    """`{% generation %}`, with which templates mark the assistant's text for training. Here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - as jinja declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Renderer:
    """Answers with JSON: for the template, the `names` that it reads; for values, the `text`; or a `problem`."""

    def __init__(self) -> None:
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
        )
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["strftime_now"] = _strftime_now
        self._environment.filters["tojson"] = to_json
        self._template: Template | None = None

    def answer(self, line: bytes) -> str:
        try:
            question = json.loads(line)
            return json.dumps(self._compile(question) if self._template is None else self._render(question))
        except MemoryError:
            problem = f"it needs more than {MAX_MEMORY_BYTES >> 20} MiB of memory"
        except TemplateSyntaxError as error:
            problem = f"syntax error in line {error.lineno}: {error}"
        except Exception as error:  # border: a template can raise anything
            problem = str(error) or type(error).__name__
        return json.dumps({"problem": problem[:MAX_PROBLEM]})

    def _compile(self, source: str) -> Mapping[str, Any]:
        self._template = self._environment.from_string(source)
        return {"names": sorted(meta.find_undeclared_variables(self._environment.parse(source)))}

    def _render(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._template is not None
        text = self._template.render(values)
        if len(text) > MAX_TEXT:
            raise TemplateError(f"the text has {len(text)} characters, more than {MAX_TEXT}")
        return {"text": text}


def _raise_exception(message: str) -> None:
    """Templates call it for unsupported messages."""
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    r"""As in transformers, with all its arguments: no HTML escapes, no `\u` escapes unless requested."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


if __name__ == "__main__":
    main()
