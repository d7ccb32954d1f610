"""Drafts from the client's predicted output."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from llmserve.scheduler.drafts.acceptance import Acceptance
from llmserve.scheduler.drafts.drafter import MAX_DRAFTED, Draftable

RESUMES_AFTER = 3  # equal tokens, once the answer differs from the prediction


class ClientDrafter(Acceptance):
    """Continues the predicted output: from its beginning while the answer equals it, otherwise after the answer's
    newest tokens. It is trusted until it is wrong."""

    def __init__(self, draft_ids: Sequence[int], num_prompt: int) -> None:
        super().__init__(num_rejected=0.0)
        self._draft = array("i", draft_ids)
        self._num_prompt = num_prompt
        self._num_same = 0  # first tokens of the answer that equal the prediction
        ends = range(RESUMES_AFTER, len(self._draft))
        self._follows = {self._draft[end - RESUMES_AFTER : end].tobytes(): end for end in ends}

    def propose(self, sequence: Draftable, threshold: float) -> Sequence[int]:
        token_ids, draft = sequence.token_ids, self._draft
        num_output = len(token_ids) - self._num_prompt
        place = self._num_same
        while place < min(num_output, len(draft)) and draft[place] == token_ids[self._num_prompt + place]:
            place += 1
        self._num_same = place
        if place < num_output:
            place = self._follows.get(token_ids[-RESUMES_AFTER:].tobytes(), len(draft))
        return self.worthwhile(draft[place : place + MAX_DRAFTED], threshold)
