"""A language model makes no embeddings, and the refusal says what it does."""

from __future__ import annotations

import httpx
import openai
import pytest


def test_embeddings_are_refused_in_words(client: openai.OpenAI, http: httpx.Client) -> None:
    with pytest.raises(openai.BadRequestError, match="'ensemble' answers text with text; use /v1") as caught:
        client.embeddings.create(model="ensemble", input="fox")
    assert caught.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="text-embedding-3-small", input="fox")
    answer = http.post("/api/embed", json={"model": "ensemble", "input": "fox"})
    assert answer.status_code == 400
    assert "use /v1/chat/completions" in answer.json()["error"]
    answer = http.post("/v1/rerank", json={"query": "fox", "documents": ["dog"]})
    assert answer.status_code == 400
    assert "model 'ensemble' answers text with text" in answer.json()["error"]["message"]
