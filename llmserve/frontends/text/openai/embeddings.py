"""POST /v1/embeddings of OpenAI's API, with additions for vLLM's clients, and Ollama's /api/embed."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from fastapi import Request, Response
from numpy.typing import NDArray
from pydantic import Field

from llmserve.core import EMBEDDINGS
from llmserve.frontends.http.bodies import off_loop
from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.text.answers.event_stream import json_answer
from llmserve.frontends.text.answers.vectors import JSON_BYTES, Vectors, check_dimensions, check_makes, cut, vectors
from llmserve.frontends.text.ollama.routes import LATEST
from llmserve.frontends.text.requests.ensembles import Values
from llmserve.frontends.text.requests.fields import ModelName, TokenId
from llmserve.frontends.text.requests.validation import Strict, at_most, ignored
from llmserve.frontends.text.state import ApiState

MAX_INPUTS = 2048  # OpenAI's limit
MAX_IDS = 128 * 1024  # of one text
Ids: TypeAlias = Annotated[list[TokenId], Field(min_length=1), at_most(MAX_IDS)]
Texts: TypeAlias = Annotated[list[str], Field(min_length=1), at_most(MAX_INPUTS)]
Input: TypeAlias = str | Texts | Ids | Annotated[list[Ids], Field(min_length=1), at_most(MAX_INPUTS)]


class EmbeddingsRequest(Strict):
    model: ModelName = ""
    input: Input = Field(description="A text, a list of texts, token ids, or a list of such lists.")
    encoding_format: Literal["float", "base64"] | None = Field(None, description="base64: little-endian float32.")
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="Length of the embedding, if config.json says that the model's embeddings can be shortened."
    )
    user: str | None = Field(None, description="A label; it has no effect.")
    truncate_prompt_tokens: Annotated[Any, ignored("texts that are too long are refused, not truncated", -1)] = None


class EmbedRequest(Strict):
    """Ollama's request for embeddings."""

    model: ModelName = ""
    input: str | Texts = Field(description="A text, or a list of texts.")
    dimensions: Annotated[int | None, Field(ge=1, le=2**31 - 1, description="Length of the vectors.")] = None
    truncate: Annotated[Any, ignored("texts that are too long are refused, not truncated", False)] = None
    keep_alive: Any = Field(None, description="No effect: the server decides how long a model stays loaded.")
    options: Any = Field(None, description="No effect: they apply to generated text.")


def values_of(given: Input) -> list[Values]:
    """The ensemble's inputs for each text."""
    if isinstance(given, str):
        return [{"text_input": [given]}]
    if isinstance(given[0], int):
        return [{"prompt_ids": given}]
    return [{"text_input": [one]} if isinstance(one, str) else {"prompt_ids": one} for one in given]


@dataclass(frozen=True, slots=True)
class Embeddings:
    state: ApiState

    async def create(self, body: EmbeddingsRequest, request: Request) -> Response:
        """Make an embedding for each text."""
        write = _base64 if body.encoding_format == "base64" else _numbers

        def document(found: Vectors) -> dict[str, Json]:
            data = [
                {"object": "embedding", "index": index, "embedding": write(cut(row, body.dimensions))}
                for index, row in enumerate(found.rows)
            ]
            usage = {"prompt_tokens": found.num_tokens, "total_tokens": found.num_tokens}
            return {"object": "list", "data": data, "model": body.model, "usage": usage}

        return await self._answer(body, request, document)

    async def embed(self, body: EmbedRequest, request: Request) -> Response:
        """Make embeddings, in Ollama's format."""
        began_ns, asked = time.monotonic_ns(), body.model
        body.model = asked.removesuffix(LATEST)

        def document(found: Vectors) -> dict[str, Json]:
            rows = [cut(row, body.dimensions).tolist() for row in found.rows]
            times = {"total_duration": time.monotonic_ns() - began_ns, "load_duration": 0}
            return {"model": asked, "embeddings": rows, **times, "prompt_eval_count": found.num_tokens}

        return await self._answer(body, request, document)

    async def _answer(
        self, body: EmbeddingsRequest | EmbedRequest, request: Request, document: Callable[[Vectors], dict[str, Json]]
    ) -> Response:
        ensemble, caller = self.state.embedders.named(body), self.state.caller(request)
        check_makes(caller, ensemble, EMBEDDINGS, "/v1/rerank")
        check_dimensions(caller, ensemble, body.dimensions)
        found = await vectors(caller, ensemble, values_of(body.input), "embedding", "input")
        size = JSON_BYTES * sum(row.size for row in found.rows)
        caller.request.share.grow(size)
        return await off_loop(caller.request, lambda: json_answer({**document(found), **found.warning()}), size=size)


def _numbers(row: NDArray[np.float32]) -> list[float]:
    numbers: list[float] = row.tolist()
    return numbers


def _base64(row: NDArray[np.float32]) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()
