"""What a guide leaves no choice of, or only how much white space: its tokens need a row each, no step of their own."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.scheduler.drafts.acceptance import Acceptance
from llmserve.scheduler.drafts.drafter import MAX_DRAFTED, Draftable

PRIOR_ACCEPTED = 8.0  # tokens: it is not given up for one draft that was wrong


class GrammarDrafter(Acceptance):
    """Wrong where an answer writes other white space than before, or other tokens than the tokenizer."""

    def __init__(self) -> None:
        super().__init__(num_rejected=0.0, num_accepted=PRIOR_ACCEPTED)

    def propose(self, sequence: Draftable, threshold: float) -> Sequence[int]:
        return () if sequence.matcher is None else self.worthwhile(sequence.matcher.likely()[:MAX_DRAFTED], threshold)
