"""Estimates how many tokens of a draft are worth their rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmserve.scheduler.drafts.drafter import MAX_DRAFTED

FORGETTING = 0.9  # weight of a draft, relative to the next one
RECOVERY = 0.97  # weight of rejected drafts after each token without a draft, so that drafting is tried again


class Acceptance:
    """Counts of accepted and rejected drafts of one drafter, for one sequence."""

    def __init__(self, num_rejected: float, num_accepted: float = 1.0) -> None:
        """`num_rejected` drafts and `num_accepted` tokens are the prior."""
        self.num_accepted = num_accepted
        self.num_rejected = num_rejected

    @property
    def probability(self) -> float:
        """Probability that a drafted token is accepted."""
        return (self.num_accepted + 0.1) / (self.num_accepted + self.num_rejected + 0.1)

    def worthwhile(self, token_ids: Sequence[int], threshold: float) -> Sequence[int]:
        """The first tokens of a draft, as far as their probability of acceptance exceeds `threshold`."""
        return token_ids[: self.num_worthwhile(threshold)] if token_ids else token_ids

    def num_worthwhile(self, threshold: float) -> int:
        num_tokens = self.num_likely(threshold)
        if not num_tokens:
            self.recover()
        return num_tokens

    def recover(self) -> None:
        """Call it after a token without a draft."""
        self.num_rejected *= RECOVERY

    def num_likely(self, threshold: float) -> int:
        """The number of tokens whose probability exceeds `threshold`. Token n of a draft is accepted with the n-th
        power of a token's probability. If none was ever wrong, a few are worthwhile at any threshold: rows may cost
        less than was measured."""
        if not self.num_rejected:
            return MAX_DRAFTED if threshold < 1 else min(int(self.num_accepted), MAX_DRAFTED)
        probability = self.probability
        num_tokens = int(math.log(threshold) / math.log(probability)) if 0 < threshold < 1 and probability < 1 else 0
        return min(num_tokens, MAX_DRAFTED)

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        self.num_accepted = FORGETTING * self.num_accepted + num_accepted
        self.num_rejected = FORGETTING * self.num_rejected + (num_accepted < num_drafted)
