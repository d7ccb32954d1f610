"""What a model has drafted for one sequence, and whether to draft another token behind it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple

from llmserve.scheduler.drafts.acceptance import Acceptance
from llmserve.scheduler.drafts.confidence import Confidence
from llmserve.scheduler.drafts.drafter import Draftable
from llmserve.scheduler.sequence import Sequence

MARGIN = 1.3  # times the threshold: drafts make steps rarer, so that time for one more is worth more than without them


class ModelDrafter(Acceptance):
    """It expects what the model's drafts were worth to others of late."""

    def __init__(self, others: Acceptance, confidence: Confidence) -> None:
        super().__init__(others.num_rejected, others.num_accepted)
        self.drafted = array("i")  # and not proposed yet
        self._log_probs: list[float] = []  # of what was drafted last
        self._chance = 1.0  # of all of it to be drawn
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
        """Whether one more is worth a step of the model, of which nobody knows more than how often it is right."""
        return self._chance * self.probability > MARGIN * threshold

    def propose(self, sequence: Draftable, threshold: float) -> Seq[int]:
        """All of it: rows are cheap beside the steps that drafted it."""
        drafted, self.drafted = self.drafted, array("i")
        return drafted

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        super().learn(num_drafted, num_accepted)
        self._others.learn(num_drafted, num_accepted)
        for place, log_prob in enumerate(self._log_probs[: min(num_drafted, num_accepted + 1)]):
            self._confidence.learn(log_prob, is_drawn=place < num_accepted)


class Wish(NamedTuple):
    """So many tokens, at most, are to be drafted for a sequence."""

    sequence: Sequence
    drafter: ModelDrafter
    num_tokens: int
