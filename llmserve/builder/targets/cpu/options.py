"""Options that only the cpu target has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmserve.builder.flag import Flag, option
from llmserve.builder.targets.options import TargetOptions


@dataclass(frozen=True, slots=True)
class CpuOptions(TargetOptions):
    keeps_blocks: ClassVar[bool] = True

    draft_vocabulary: str = option(
        "",
        Flag(
            "JSON lines with text, messages or prompt_ids: an engine for serve --draft-engine that drafts only tokens "
            "of these",
            default_text="all tokens",
            leaves_a_trace=False,  # the digest covers the tokens
            is_path=True,
        ),
    )

    def words_of_the_name(self) -> tuple[str, ...]:
        return ("draft-vocabulary",) if self.draft_vocabulary else ()
