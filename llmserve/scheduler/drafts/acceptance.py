"""How many tokens of a draft are worth their rows, as far as is known."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmserve.scheduler.drafts.drafter import MAX_DRAFTED

FORGETTING = 0.9  # what an older draft weighs beside the next one
RECOVERY = 0.97  # what rejected drafts weigh after each token that was not worth a draft: it is tried again


class Acceptance:
    """What the drafts of one drafter have been worth to one sequence."""

    def __init__(self, num_rejected: float, num_accepted: float = 1.0) -> None:
        """`num_rejected`: drafts, for so many tokens accepted, before anything is known."""
        self.num_accepted = num_accepted
        self.num_rejected = num_rejected

    @property
    def probability(self) -> float:
        """Of a token to be drawn."""
        return (self.num_accepted + 0.1) / (self.num_accepted + self.num_rejected + 0.1)

    def worthwhile(self, token_ids: Sequence[int], threshold: float) -> Sequence[int]:
        """Of a draft, those that are each likelier than `threshold` to be drawn."""
        return token_ids[: self.num_worthwhile(threshold)] if token_ids else token_ids

    def num_worthwhile(self, threshold: float) -> int:
        num_tokens = self.num_likely(threshold)
        if not num_tokens:
            self.num_rejected *= RECOVERY
        return num_tokens

    def num_likely(self, threshold: float) -> int:
        """Token n of a draft is drawn with the n-th power of a token's probability."""
        if not self.num_rejected:
            return MAX_DRAFTED
        probability = self.probability
        num_tokens = int(math.log(threshold) / math.log(probability)) if 0 < threshold < 1 and probability < 1 else 0
        return min(num_tokens, MAX_DRAFTED)

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        self.num_accepted = FORGETTING * self.num_accepted + num_accepted
        self.num_rejected = FORGETTING * self.num_rejected + (num_accepted < num_drafted)
