"""POST /v1/embeddings, and Ollama's /api/embed: refused in words that say why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from fastapi import Request
from pydantic import BaseModel, ConfigDict

from llmserve.frontends.text.answers.failures import Refused
from llmserve.frontends.text.requests.fields import ModelName
from llmserve.frontends.text.state import ApiState


class EmbeddingsRequest(BaseModel):
    """Whatever else it asks is not looked at."""

    model_config = ConfigDict(extra="allow")
    model: ModelName = ""
    input: Any = None


@dataclass(frozen=True, slots=True)
class Embeddings:
    state: ApiState

    async def create(self, body: EmbeddingsRequest, request: Request) -> NoReturn:
        """Not done here."""
        ensemble = self.state.ensembles.named(body)
        known = ", ".join(self.state.ensembles.names())
        raise Refused(
            f"model '{ensemble.name}' answers text with text, and makes no embeddings: nor does any other model that "
            f"this API has here ({known}). A model of your own that makes them is asked over /v2",
            "model",
        )
