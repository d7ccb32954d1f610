"""The protocol of drafters, which guess how a sequence continues."""

from __future__ import annotations

import functools
import operator
from array import array
from collections.abc import Sequence
from enum import Flag, auto
from typing import Protocol

from llmserve.core import Matcher

MAX_DRAFTED = 15  # tokens per sequence and step


class Speculation(Flag):
    """The enabled drafters."""

    OFF = 0
    LOOKUP = auto()  # from the sequence's own tokens
    GRAMMAR = auto()  # from its guide
    HISTORY = auto()  # from earlier answers
    DRAFT = auto()  # from a draft engine, if there is one
    ALL = LOOKUP | GRAMMAR | HISTORY | DRAFT

    @classmethod
    def read(cls, text: str) -> Speculation:
        """Parse "off" or names separated by commas. Raises `ValueError` for anything else."""
        names = {name.strip().lower() for name in text.split(",")}
        known = {drafter.words(): drafter for drafter in cls.ALL}
        if names != {"off"} and names - known.keys():
            raise ValueError(f"expected off, or names of drafters separated by commas: {cls.ALL.words()}")
        return functools.reduce(operator.or_, (known[name] for name in names & known.keys()), cls.OFF)

    def words(self) -> str:
        return ",".join(str(drafter.name).lower() for drafter in self) or "off"


class Draftable(Protocol):
    """The attributes of a sequence that drafters read."""

    token_ids: array[int]  # prompt, then output
    matcher: Matcher | None  # of its guide, advanced by the output


class Drafter(Protocol):
    """Drafts for one sequence."""

    def propose(self, sequence: Draftable, threshold: float) -> Sequence[int]:
        """At most `MAX_DRAFTED` tokens, each accepted with a probability above `threshold`; none if it has no guess.
        Called for every token, so it must be fast."""
        ...

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a verified draft."""
        ...
