"""The base class of every target's own options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from llmserve.builder.flag import declared, flag_of, value_problems


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Options that only some targets have; fields are made with `flag.option`.

    If two targets have an option of the same name, its meaning and default are the same.
    """

    keeps_blocks: ClassVar[bool] = False  # for a GGUF file, if no format is given

    def problems(self) -> list[str]:
        """Returns everything that is wrong with these values."""
        return value_problems(self)

    def in_other_words(self) -> Mapping[str, Any]:
        """Their meaning in terms of the options that every target has."""
        return {}

    def words_of_the_name(self) -> tuple[str, ...]:
        """Words that they add to the name of an engine directory."""
        return ()

    def as_dict(self) -> dict[str, Any]:
        """Options that affect the engine."""
        names = [name for name, declaration in declared(type(self)).items() if flag_of(declaration).leaves_a_trace]
        return {name: getattr(self, name) for name in names}
