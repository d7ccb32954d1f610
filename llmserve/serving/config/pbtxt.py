"""Reads `config.pbtxt`: protobuf text format, every unknown field reported with its line."""

from __future__ import annotations

import re

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

_TOKEN = re.compile(r"""#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[{}<>\[\],;:]|[^\s{}<>\[\],;:"'#]+""")
_OPENING = {"{": "}", "<": ">", "[": "]"}
_MAX_PROBLEMS = 50


def parse_config_text(text: str) -> tuple[ModelConfig, list[str]]:
    """The config and all problems of its text, as "line 3, column 1: ...".

    A config with problems is empty or partial. Unknown fields are blanked out and parsing continues, so that one report
    lists them all.
    """
    problems: list[str] = []
    while len(problems) < _MAX_PROBLEMS:
        config = ModelConfig()
        try:
            text_format.Parse(text, config)
        except text_format.ParseError as error:
            problems.append(_describe(error))
            start = _offset(text, error)
            if start is None or "has no field named" not in str(error):
                return ModelConfig(), problems
            text = _without_field(text, start)
        except ValueError as error:  # an unknown enum number: the parser's own assignment fails
            return ModelConfig(), [*problems, str(error)]
        else:
            return config, problems
    return ModelConfig(), problems


def _describe(error: text_format.ParseError) -> str:
    message = re.sub(r"^\d+:\d+ : ", "", str(error))
    message = re.sub(r'^Message type "inference\.(.+)" has no field named "(\w+)"\.$', r"\1 has no field '\2'", message)
    return f"line {error.GetLine()}, column {error.GetColumn()}: {message}"


def _offset(text: str, error: text_format.ParseError) -> int | None:
    line: int | None = error.GetLine()
    column: int | None = error.GetColumn()
    if line is None or column is None:
        return None
    return sum(len(row) for row in text.splitlines(keepends=True)[: line - 1]) + column - 1


def _without_field(text: str, start: int) -> str:
    """`text` with the field whose name begins at `start` replaced by spaces; lines keep their numbers."""
    tokens = (match for match in _TOKEN.finditer(text, start) if not match.group().startswith("#"))
    end = next(tokens).end()  # the name
    open_brackets: list[str] = []
    for match in tokens:
        token, end = match.group(), match.end()
        if token in _OPENING:
            open_brackets.append(_OPENING[token])
        elif open_brackets and token == open_brackets[-1]:
            open_brackets.pop()
        if not open_brackets and token != ":":
            break
    return text[:start] + re.sub(r"[^\n]", " ", text[start:end]) + text[end:]
