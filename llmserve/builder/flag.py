"""Declares a build option: a field of a frozen dataclass, with the data for its flag and its recipe key.

`llmserve build`'s flags, a recipe's keys and the checks of their values all derive from these declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from typing import Any, TypeVar, cast

Value = TypeVar("Value")
KEY = "flag"  # key in a field's metadata


class Elsewhere(Enum):
    """The meaning of one target's option for targets that do not have it."""

    REFUSED = "refused"  # it would have changed the engine
    WITHOUT_EFFECT = "without effect"  # it only tunes how its own target builds or computes: reported
    ANOTHER_NAME = "another name"  # an alias of an option that every target has


@dataclass(frozen=True, slots=True)
class Flag:
    help: str
    choices: tuple[str, ...] = ()  # the default is always one of them, listed or not
    least: int | None = None
    default_text: str | None = None  # shown instead of the default
    elsewhere: Elsewhere = Elsewhere.REFUSED
    leaves_a_trace: bool = True  # whether the engine's options have it
    is_path: bool = False  # in a recipe, relative to its folder

    @property
    def help_with_choices(self) -> str:
        return f"{self.help}: {' | '.join(self.choices)}" if self.choices else self.help


def option(default: Value, flag: Flag) -> Value:
    """A field of a frozen dataclass with this default."""
    return field(default=default, metadata={KEY: flag})


def declared(options: type) -> Mapping[str, Field[Any]]:
    """The fields of an options dataclass that were made with `option`."""
    return {each.name: each for each in fields(options) if KEY in each.metadata}


def flag_of(declaration: Field[Any]) -> Flag:
    return cast(Flag, declaration.metadata[KEY])


def value_problems(options: Any, advice: Callable[[str, str], str] = lambda name, value: "") -> list[str]:
    """Values that are not among the choices, with `advice(name, value)` on each, and values that are too small."""
    found = []
    for name, declaration in declared(type(options)).items():
        flag, value = flag_of(declaration), getattr(options, name)
        if flag.choices and value not in (*flag.choices, declaration.default):
            or_none = "" if declaration.default else ", or omitted"
            problem = f"{name} must be one of {', '.join(flag.choices)}{or_none}, got {value!r}"
            found.append("; ".join(filter(None, (problem, advice(name, value)))))
        if flag.least is not None and value < flag.least:
            found.append(f"{name} must be at least {flag.least}, got {value}")
    return found
