"""A model's drafts for one sequence, and whether to draft another token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple

from llmserve.scheduler.drafts.acceptance import Acceptance
from llmserve.scheduler.drafts.confidence import Confidence
from llmserve.scheduler.drafts.drafter import Draftable
from llmserve.scheduler.sequence import Sequence

MARGIN = 1.3  # factor on the threshold: with drafts, steps are rarer, so the time of a model's step is worth more


class ModelDrafter(Acceptance):
    """Its prior is the recent acceptance of the model's drafts for other sequences."""

    def __init__(self, others: Acceptance, confidence: Confidence) -> None:
        super().__init__(others.num_rejected, others.num_accepted)
        self.drafted = array("i")  # drafted, not proposed yet
        self._log_probs: list[float] = []  # of the last draft's tokens
        self._chance = 1.0  # probability that the whole draft is accepted
        self._others = others
        self._confidence = confidence

    def begin(self) -> None:
        self._log_probs.clear()
        self._chance = 1.0

    def add(self, token: int, log_prob: float) -> None:
        self.drafted.append(token)
        self._log_probs.append(log_prob)
        self._chance *= self._confidence.probability(log_prob)

    def goes_on(self, threshold: float) -> bool:
        """Whether another token is worth a step of the model."""
        return self._chance * self.probability > MARGIN * threshold

    def propose(self, sequence: Draftable, threshold: float) -> Seq[int]:
        """The whole draft: rows are cheap compared with the model's steps."""
        drafted, self.drafted = self.drafted, array("i")
        return drafted

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        super().learn(num_drafted, num_accepted)
        self._others.learn(num_drafted, num_accepted)
        for place, log_prob in enumerate(self._log_probs[: min(num_drafted, num_accepted + 1)]):
            self._confidence.learn(log_prob, is_drawn=place < num_accepted)


class Wish(NamedTuple):
    """A request to draft at most `num_tokens` tokens for a sequence."""

    sequence: Sequence
    drafter: ModelDrafter
    num_tokens: int
