"""Options of the fake target: one that decides what the engine is, and one that does not."""

from __future__ import annotations

from dataclasses import dataclass

from llmserve.builder.flag import Elsewhere, Flag, option
from llmserve.builder.targets.options import TargetOptions


@dataclass(frozen=True, slots=True)
class FakeOptions(TargetOptions):
    level: int = option(0, Flag("How fake it is", least=0))
    effort: str = option("low", Flag("Spent on it", ("low", "high"), elsewhere=Elsewhere.WITHOUT_EFFECT))

    def words_of_the_name(self) -> tuple[str, ...]:
        return ("fake",)
