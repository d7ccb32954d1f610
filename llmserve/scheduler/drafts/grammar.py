"""Drafts tokens that a guide forces, or leaves only a choice of white space. They cost a row each instead of a step."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.scheduler.drafts.acceptance import Acceptance
from llmserve.scheduler.drafts.drafter import MAX_DRAFTED, Draftable

PRIOR_ACCEPTED = 8.0  # tokens, so that one wrong draft does not disable it


class GrammarDrafter(Acceptance):
    """Its drafts are wrong if an answer changes its white space, or splits text differently from the tokenizer."""

    def __init__(self) -> None:
        super().__init__(num_rejected=0.0, num_accepted=PRIOR_ACCEPTED)

    def propose(self, sequence: Draftable, threshold: float) -> Sequence[int]:
        return () if sequence.matcher is None else self.worthwhile(sequence.matcher.likely()[:MAX_DRAFTED], threshold)
