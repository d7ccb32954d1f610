"""The text that a guide leaves no choice of: its tokens need a row each, and no step of their own."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.scheduler.drafts.acceptance import Acceptance
from llmserve.scheduler.drafts.drafter import MAX_DRAFTED, Draftable


class GrammarDrafter(Acceptance):
    """Right, but for banned words and texts that an answer writes in other tokens than the tokenizer."""

    def __init__(self) -> None:
        super().__init__(num_rejected=0.0)

    def propose(self, sequence: Draftable) -> Sequence[int]:
        return () if sequence.matcher is None else sequence.matcher.forced()[:MAX_DRAFTED]
