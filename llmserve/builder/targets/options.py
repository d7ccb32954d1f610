"""What every target's own options have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from llmserve.builder.flag import declared, flag_of, value_problems


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Options that only some targets have: fields made with `flag.option`.

    Two targets may have one of the same name, which then means the same and has the same default.
    """

    keeps_blocks: ClassVar[bool] = False  # of a GGUF file, where no format is asked for

    def problems(self) -> list[str]:
        """Everything that is wrong with these values."""
        return value_problems(self)

    def in_other_words(self) -> Mapping[str, Any]:
        """What they say of the options that every target has."""
        return {}

    def words_of_the_name(self) -> tuple[str, ...]:
        """What they add to the name of an engine directory."""
        return ()

    def as_dict(self) -> dict[str, Any]:
        """Those that leave a trace in the engine."""
        names = [name for name, declaration in declared(type(self)).items() if flag_of(declaration).leaves_a_trace]
        return {name: getattr(self, name) for name in names}
