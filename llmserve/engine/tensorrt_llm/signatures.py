"""Checks whether something can be called as we call it, from its signature: Python's, pydantic's, or a compiled one.

Compiled bindings (nanobind, pybind11) have no signature that `inspect` reads. They write it into their documentation,
one line for each overload: `__init__(self, max_beam_width: int = 1, *, top_k: int | None = None) -> None`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from inspect import Parameter
from typing import Any, TypeAlias

Parameters: TypeAlias = Sequence[Parameter]  # of one overload

OPENING, CLOSING = "([{", ")]}"
PARAMETER = re.compile(r"(\*{0,2})([A-Za-z_]\w*)")
VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
DOCUMENTED = re.compile(r"(?:\d+\.\s*)?`{0,2}\w+\((.*)")  # "1. ``name(" begins an overload's line


def call_problems(found: Any, num_positional: int, keywords: Sequence[str]) -> list[str] | None:
    """Why `found` cannot be called with so many values and these keywords; for overloads, of the nearest one.

    A method that was looked up in its class takes its object as the first value. None if it cannot be determined.
    """
    mismatches = [list(_mismatches(each, num_positional, keywords)) for each in signatures(found)]
    return min(mismatches, key=len, default=None)


def has_member(found: Any, member: str) -> bool:
    """For an enumeration or a class; a dataclass's field without a default is not an attribute of the class."""
    return hasattr(found, member) or (is_dataclass(found) and member in [field.name for field in fields(found)])


def signatures(found: Any) -> list[Parameters]:
    """Signatures of all overloads; empty if the parameters of `found` are unknown."""
    if models := getattr(found, "model_fields", None):  # pydantic, whose __init__ may say no more than (**data)
        return [[_field(name, model) for name, model in models.items()]]
    try:
        read = list(inspect.signature(found).parameters.values())
    except ValueError:
        return _documented(found)
    return _documented(found) if _says_nothing(read) else [read]


def _field(name: str, model: Any) -> Parameter:
    default = Parameter.empty if model.is_required() else None
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default)


def _documented(found: Any) -> list[Parameters]:
    """For a class: its constructor, which is called without the object."""
    is_class = inspect.isclass(found)
    text = (found.__init__.__doc__ if is_class else found.__doc__) or ""
    overloads = [_parsed(match[1]) for line in text.splitlines() if (match := DOCUMENTED.match(line.strip()))]
    return [each[1:] if is_class else each for each in overloads if not _says_nothing(each)]


def _says_nothing(parameters: Parameters) -> bool:
    """(*args, **kwargs): a wrapped function, or pybind11's heading of overloads."""
    return tuple(each.kind for each in parameters if each.name != "self") == VARIADIC


def _parsed(text: str) -> list[Parameter]:
    """`text`: what follows the opening parenthesis."""
    parameters: list[Parameter] = []
    is_keyword_only = False
    for part in _split(text):
        match = PARAMETER.match(part)
        if part == "/":
            parameters = [each.replace(kind=Parameter.POSITIONAL_ONLY) for each in parameters]
        elif match:
            plain = Parameter.KEYWORD_ONLY if is_keyword_only else Parameter.POSITIONAL_OR_KEYWORD
            kind = {"*": Parameter.VAR_POSITIONAL, "**": Parameter.VAR_KEYWORD}.get(match[1], plain)
            default = None if "=" in part and not match[1] else Parameter.empty
            parameters.append(Parameter(match[2], kind, default=default))
        is_keyword_only |= part.startswith("*")
    return parameters


def _split(text: str) -> Iterator[str]:
    """The parts between commas, up to the final closing parenthesis; brackets within types are not split."""
    depth, start = 0, 0
    for position, character in enumerate(text):
        if character in CLOSING and depth == 0:
            yield text[start:position].strip()
            return
        depth += (character in OPENING) - (character in CLOSING)
        if character == "," and depth == 0:
            yield text[start:position].strip()
            start = position + 1


def _mismatches(known: Parameters, num_positional: int, keywords: Sequence[str]) -> Iterator[str]:
    kinds = [each.kind for each in known]
    by_position = [each for each in known if each.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    by_name = {each.name for each in known if each.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)}
    if num_positional > len(by_position) and Parameter.VAR_POSITIONAL not in kinds:
        yield f"takes {len(by_position)} positional arguments, but we pass {num_positional}"
    given = {each.name for each in by_position[:num_positional]}
    for keyword in keywords:
        if keyword in given or (keyword not in by_name and Parameter.VAR_KEYWORD not in kinds):
            yield f"takes no parameter {keyword}"
    for each in known:
        is_optional = each.default is not Parameter.empty or each.kind in VARIADIC
        if not is_optional and each.name not in given and each.name not in keywords:
            yield f"requires a parameter {each.name}, which we do not pass"
