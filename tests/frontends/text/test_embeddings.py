"""There are no embeddings here, and the refusal says why."""

from __future__ import annotations

import httpx
import openai
import pytest


def test_embeddings_are_refused_in_words(client: openai.OpenAI, http: httpx.Client) -> None:
    with pytest.raises(
        openai.BadRequestError, match="'ensemble' answers text with text, and makes no embeddings"
    ) as caught:
        client.embeddings.create(model="ensemble", input="fox")
    assert caught.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="text-embedding-3-small", input="fox")
    answer = http.post("/api/embed", json={"model": "ensemble", "input": "fox"})
    assert answer.status_code == 400
    assert "makes no embeddings" in answer.json()["error"]
