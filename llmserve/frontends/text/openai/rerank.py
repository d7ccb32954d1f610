"""POST /v1/rerank in the format of Jina and Cohere, as in vLLM and llama.cpp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Request, Response
from pydantic import Field

from llmserve.core import SCORES
from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.text.answers.event_stream import json_answer
from llmserve.frontends.text.answers.replies import new_id
from llmserve.frontends.text.answers.vectors import check_makes, vectors
from llmserve.frontends.text.openai.embeddings import MAX_INPUTS
from llmserve.frontends.text.requests.ensembles import Values
from llmserve.frontends.text.requests.fields import ModelName
from llmserve.frontends.text.requests.validation import Strict, at_most, ignored
from llmserve.frontends.text.state import ApiState


class Document(Strict):
    text: str


class RerankRequest(Strict):
    model: ModelName = ""
    query: str = Field(description="The text that documents are compared with.")
    documents: Annotated[list[str | Document], Field(min_length=1, description="Texts to score."), at_most(MAX_INPUTS)]
    top_n: Annotated[int | None, Field(ge=1, description="Most results, best first. All by default.")] = None
    return_documents: bool | None = Field(None, description="Return the texts, too.")
    user: str | None = Field(None, description="A label; it has no effect.")
    max_tokens_per_doc: Annotated[Any, ignored("documents that are too long are refused, not truncated")] = None
    truncate_prompt_tokens: Annotated[Any, ignored("documents that are too long are refused, not truncated", -1)] = None

    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


@dataclass(frozen=True, slots=True)
class Rerank:
    state: ApiState

    async def create(self, body: RerankRequest, request: Request) -> Response:
        """Score how well each document answers the query, best first."""
        ensemble, caller = self.state.embedders.named(body), self.state.caller(request)
        check_makes(caller, ensemble, SCORES, "/v1/embeddings")
        texts = body.texts()
        pairs: list[Values] = [{"text_input": [body.query], "second_text": [text]} for text in texts]
        found = await vectors(caller, ensemble, pairs, "score", "documents")
        scores = [float(row[0]) for row in found.rows]
        order = sorted(range(len(texts)), key=lambda index: (-scores[index], index))[: body.top_n]
        results: list[Json] = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": texts[index]}} if body.return_documents else {})
            for index in order
        ]
        usage = {"prompt_tokens": found.num_tokens, "total_tokens": found.num_tokens}
        answer = {"id": new_id("rerank"), "object": "list", "model": body.model}
        return json_answer({**answer, "results": results, "usage": usage, **found.warning()})
