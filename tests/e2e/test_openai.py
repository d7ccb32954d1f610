"""The official clients of OpenAI and Anthropic against a real server process, and what is left in it."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import openai

from tests.e2e.conftest import ServerProcess
from tests.e2e.test_streaming import DOCUMENTS, num_cancelled, used_blocks, wait_for_idle

MODEL = "ensemble"
QUESTION = "Summarize: The connection is closed. Any pending data is sent before."
ANSWER = "Close the connection."


def test_openais_client(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        messages: Any = [{"role": "user", "content": QUESTION}]
        made = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
        assert (made.choices[0].message.content, made.choices[0].finish_reason) == (ANSWER, "stop")
        chunks = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
        response = client.responses.create(model=MODEL, input=QUESTION, temperature=0)
        assert (response.output_text, response.status) == (ANSWER, "completed")


def test_anthropics_client(server: ServerProcess) -> None:
    with anthropic.Anthropic(base_url=server.http, api_key="none", max_retries=0) as client:
        made = client.messages.create(
            model=MODEL, max_tokens=50, messages=[{"role": "user", "content": QUESTION}], extra_body={"top_k": 1}
        )
        assert made.content[0].type == "text"
        assert (made.content[0].text, made.stop_reason) == (ANSWER, "end_turn")


def test_a_client_that_leaves_frees_its_sequence(server: ServerProcess) -> None:
    """Because its request is cancelled, not because it came to its end."""
    wait_for_idle(server)
    before = num_cancelled(server)
    body = {"model": MODEL, "prompt": "x", "max_tokens": None, "ignore_eos": True, "stream": True, "n": 4}
    with httpx.Client() as client, client.stream("POST", f"{server.http}/v1/completions", json=body) as answer:
        pieces = answer.iter_raw()  # which closes the answer when it goes
        next(pieces)
        assert used_blocks(server) > 0
    wait_for_idle(server)
    assert num_cancelled(server) == before + 1


def test_an_answer_is_scored_as_it_was_made(server: ServerProcess) -> None:
    """To the bit: whether a token is computed as a part of a prompt or by itself."""
    with openai.OpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": MODEL, "temperature": 0, "logprobs": 2}
        made = client.completions.create(**asked, prompt=f"Summarize:\n{DOCUMENTS[1]}", max_tokens=8).choices[0]
        whole = f"Summarize:\n{DOCUMENTS[1]}{made.text}"
        scored = client.completions.create(**asked, prompt=whole, max_tokens=0, echo=True).choices[0]
    assert made.logprobs is not None
    assert scored.logprobs is not None
    size = len(made.logprobs.tokens or ())
    assert (scored.logprobs.tokens or [])[-size:] == made.logprobs.tokens
    assert (scored.logprobs.token_logprobs or [])[-size:] == made.logprobs.token_logprobs
    assert (scored.logprobs.top_logprobs or [])[-size:] == made.logprobs.top_logprobs
