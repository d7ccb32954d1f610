"""POST /invocations: Amazon SageMaker's only path. The body determines the API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Request, Response
from pydantic import Discriminator, RootModel, Tag

from llmserve.frontends.text.openai.chat import Chat
from llmserve.frontends.text.openai.chat_fields import ChatRequest
from llmserve.frontends.text.openai.completions import CompletionRequest, Completions
from llmserve.frontends.text.openai.embeddings import Embeddings, EmbeddingsRequest


def _kind(body: Any) -> str:
    """The tag of a body's API. It is in brackets, so the places of problems leave it out."""
    found = body if isinstance(body, dict) else {}
    return "[input]" if "input" in found else "[prompt]" if "prompt" in found else "[messages]"


class Invocation(RootModel[Any]):
    root: Annotated[
        Annotated[ChatRequest, Tag("[messages]")]
        | Annotated[CompletionRequest, Tag("[prompt]")]
        | Annotated[EmbeddingsRequest, Tag("[input]")],
        Discriminator(_kind),
    ]


@dataclass(frozen=True, slots=True)
class Invocations:
    chat: Chat
    completions: Completions
    embeddings: Embeddings

    async def create(self, body: Invocation, request: Request) -> Response:
        """Answer like /v1/chat/completions, /v1/completions or /v1/embeddings, depending on the body."""
        asked = body.root
        if isinstance(asked, ChatRequest):
            return await self.chat.create(asked, request)
        if isinstance(asked, CompletionRequest):
            return await self.completions.create(asked, request)
        return await self.embeddings.create(asked, request)
