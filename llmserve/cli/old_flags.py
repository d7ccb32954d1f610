"""Translates flags of another program before a command is parsed, by a table with a row for each flag.

A key of a table is a flag's name without leading dashes, and what it takes, as in getopt: `name` nothing, `name:` a
value, `name?` a value or none, `name*` any number. `name=value` is a row for one value only, `name=` for a flag without
a value.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

TAKES = ":?*"


@dataclass(slots=True)
class Translation:
    arguments: list[str] = field(default_factory=list)  # for the command's parser
    without_effect: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Row:
    """The translation of a flag: one of the three."""

    becomes: str | None = None  # words that replace it; {} is the value
    no_effect: str = ""  # the reason
    refused: str = ""  # what to write instead


@dataclass(frozen=True, slots=True)
class OldFlags:
    rows: Mapping[str, Row]
    takes: Mapping[str, str]  # one of TAKES, or empty

    @classmethod
    def of(cls, becomes: Mapping[str, str], no_effect: Mapping[str, str], refused: Mapping[str, str]) -> OldFlags:
        """`no_effect` and `refused`: a reason or advice to the names of flags, separated by spaces."""
        named = {name: Row(becomes=words) for name, words in becomes.items()}
        named |= {name: Row(no_effect=why) for why, names in no_effect.items() for name in names.split()}
        named |= {name: Row(refused=advice) for advice, names in refused.items() for name in names.split()}
        return cls(
            {name.rstrip(TAKES): row for name, row in named.items()},
            {name.rstrip(TAKES): name[-1] if name[-1] in TAKES else "" for name in named if "=" not in name},
        )

    def translate(self, arguments: Sequence[str]) -> Translation:
        """Translate the flags of the table. Other arguments pass unchanged."""
        done, reasons = Translation(), dict[str, list[str]]()
        rest = deque(arguments)
        while rest:
            argument = rest.popleft()
            if argument == "--":
                done.arguments += [argument, *rest]
                break
            flag, equals, value = argument.partition("=")
            name = flag.lstrip("-").replace("_", "-")
            if not argument.startswith("-") or name not in self.takes:
                done.arguments.append(argument)
                continue
            if not equals:
                value = _value(self.takes[name], rest)
            row = self.rows.get(f"{name}={value}", self.rows[name])
            if row.becomes is not None:
                done.arguments += [word.replace("{}", value) for word in row.becomes.split()]
            elif row.refused:
                done.problems.append(f"{flag} is not supported; {row.refused}")
            else:
                reasons.setdefault(row.no_effect, []).append(flag)
        done.without_effect = [f"{', '.join(flags)} ({why})" for why, flags in reasons.items()]
        return done


def _value(takes: str, rest: deque[str]) -> str:
    """The value of a flag. An existing path is an argument of the command; the old programs have no arguments."""
    taken: list[str] = []
    most = {":": 1, "?": 1, "*": len(rest)}.get(takes, 0)
    while rest and len(taken) < most and (takes == ":" or not (rest[0].startswith("-") or os.path.exists(rest[0]))):
        taken.append(rest.popleft())
    return " ".join(taken)


def say_without_effect(flags: Sequence[str]) -> None:
    if flags:
        print(f"Without effect here: {', '.join(flags)}", file=sys.stderr)
