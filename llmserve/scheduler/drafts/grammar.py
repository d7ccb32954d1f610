"""Drafts tokens that a guide forces, or leaves only a choice of white space. They cost a row each instead of a step."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.scheduler.drafts.acceptance import Acceptance
from llmserve.scheduler.drafts.drafter import MAX_DRAFTED, Draftable

PRIOR_ACCEPTED, PRIOR_REJECTED = 8.0, 1.0  # where rows are cheap, its drafts are trusted until they are wrong
LEAST_LIKELY = 0.2  # of a new answer's token, whatever other guides' drafts were worth: it is tried where it is cheap


def grammar_prior() -> Acceptance:
    return Acceptance(PRIOR_REJECTED, PRIOR_ACCEPTED)


class GrammarDrafter(Acceptance):
    """Its drafts are wrong if an answer changes its white space, or splits text differently from the tokenizer. Its
    prior is the recent acceptance of such drafts in all answers."""

    def __init__(self, others: Acceptance) -> None:
        weight, likely = PRIOR_ACCEPTED + PRIOR_REJECTED, max(LEAST_LIKELY, others.probability)
        super().__init__(num_rejected=weight * (1 - likely), num_accepted=weight * likely)
        self._others = others

    def propose(self, sequence: Draftable, threshold: float) -> Sequence[int]:
        return () if sequence.matcher is None else self.worthwhile(sequence.matcher.likely()[:MAX_DRAFTED], threshold)

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        super().learn(num_drafted, num_accepted)
        self._others.learn(num_drafted, num_accepted)
