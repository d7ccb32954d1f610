"""What all endpoints share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from fastapi import Request

from llmserve.frontends.shared.extension_state import Extensions
from llmserve.frontends.text.answers.generation import Caller, Usage
from llmserve.frontends.text.answers.log_probs import TokenTexts
from llmserve.frontends.text.requests.ensembles import Ensemble, Ensembles
from llmserve.frontends.text.requests.messages import Conversations
from llmserve.frontends.text.requests.notes import current_notes
from llmserve.frontends.text.requests.validation import wire_request


@dataclass(frozen=True, slots=True)
class ApiState:
    """Of one server."""

    ensembles: Ensembles
    extensions: Extensions
    conversations: Conversations
    token_texts: TokenTexts
    created: int = field(default_factory=lambda: int(time.time()))  # what models say of themselves

    def caller(self, request: Request) -> Caller:
        return Caller(self.ensembles.core, self.extensions, wire_request(request), current_notes())

    async def counted(self, ensemble: Ensemble, usage: Usage | None, thought: str | None) -> Usage | None:
        """With the tokens of a thought; None: the model does not think."""
        if usage is None or thought is None:
            return usage
        num_tokens = await self.ensembles.num_tokens(ensemble, thought)
        return replace(usage, reasoning=min(num_tokens, usage.completion))
