"""What all endpoints share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fastapi import Request

from llmserve.frontends.openai.ensembles import Ensembles
from llmserve.frontends.openai.generation import Caller
from llmserve.frontends.openai.log_probs import TokenTexts
from llmserve.frontends.openai.messages import Conversations
from llmserve.frontends.openai.validation import wire_request
from llmserve.frontends.shared.extension_state import Extensions


@dataclass(frozen=True, slots=True)
class State:
    """Of one server."""

    ensembles: Ensembles
    extensions: Extensions
    conversations: Conversations
    token_texts: TokenTexts
    created: int = field(default_factory=lambda: int(time.time()))  # what models say of themselves

    def caller(self, request: Request) -> Caller:
        return Caller(self.ensembles.core, self.extensions, wire_request(request))
