"""What guesses how a sequence goes on."""

from __future__ import annotations

import functools
import operator
from array import array
from collections.abc import Sequence
from enum import Flag, auto
from typing import Protocol

from llmserve.core import Matcher

MAX_DRAFTED = 15  # of a sequence in a step


class Speculation(Flag):
    """Drafters that are used."""

    OFF = 0
    LOOKUP = auto()  # from the sequence's own tokens
    GRAMMAR = auto()  # from its guide
    HISTORY = auto()  # from earlier answers
    DRAFT = auto()  # from a smaller engine, where there is one
    ALL = LOOKUP | GRAMMAR | HISTORY | DRAFT

    @classmethod
    def read(cls, text: str) -> Speculation:
        """As operators write it: "off", or names with commas between them. `ValueError` for anything else."""
        names = {name.strip().lower() for name in text.split(",")}
        known = {drafter.words(): drafter for drafter in cls.ALL}
        if names != {"off"} and names - known.keys():
            raise ValueError(f"expected off, or names of drafters separated by commas: {cls.ALL.words()}")
        return functools.reduce(operator.or_, (known[name] for name in names & known.keys()), cls.OFF)

    def words(self) -> str:
        return ",".join(str(drafter.name).lower() for drafter in self) or "off"


class Draftable(Protocol):
    """What a drafter looks at: an answer in the making."""

    token_ids: array[int]  # prompt, then output
    matcher: Matcher | None  # has seen the output


class Drafter(Protocol):
    """Of one sequence."""

    def propose(self, sequence: Draftable, threshold: float) -> Sequence[int]:
        """Tokens that may follow, at most `MAX_DRAFTED`, each likelier than `threshold` to be drawn; none where it has
        no idea. In the hot path: called for every token."""
        ...

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """How a draft has ended."""
        ...
