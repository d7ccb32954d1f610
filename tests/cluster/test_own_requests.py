"""Requests and events of our own inside of Dynamo's messages: nothing of them is lost on the way."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from llmserve.cluster import own_requests
from llmserve.cluster.own_requests import (
    LAST,
    asked,
    error_chunk,
    event_chunk,
    hello_chunk,
    hello_fields,
    read_chunk,
    read_hello_chunk,
    read_request,
    request_fields,
)
from llmserve.core import (
    FinishReason,
    GenerateRequest,
    PromptScores,
    SamplingParams,
    Tenant,
    TokenEvent,
    TopTokens,
    Usage,
)
from llmserve.engine.fake.runner import fake_engine
from llmserve.engine.remote.frames import Kind, ProtocolError
from llmserve.errors import PromptTooLong

REQUEST = GenerateRequest(
    "at the server",
    (5, 6, 7),
    SamplingParams(max_tokens=9, min_tokens=3, temperature=0.1, seed=2**64 - 1, presence_penalty=-0.3),
    end_id=2,
    stop_ids=((3,), (4, 5)),
    bad_ids=((8,),),
    embedding_bias=((9, -1.25),),
    num_sequences=2,
    return_log_probs=True,
    return_prompt_log_probs=True,
    num_top_log_probs=3,
    tenant=Tenant("acme", 2.0, 3, 4000),
)


def test_a_request_arrives_as_it_was() -> None:
    fields = json.loads(json.dumps(request_fields(REQUEST, "demo")))
    assert fields["token_ids"] == [5, 6, 7]
    frame = asked(fields)
    assert frame is not None
    found, guide = read_request(fields, frame, "at the worker")
    assert (replace(found, request_id="at the server"), guide) == (REQUEST, None)


def test_events_and_errors_arrive_as_they_were() -> None:
    event = TokenEvent(
        (7, 8),
        (-0.1, -1 / 3),
        -2.0 / 3,
        1,
        FinishReason.STOP_WORDS,
        Usage(3, 2, 9, 1, 2, 3, 4, 5),
        (TopTokens((7, 1), (-0.1, -4.0)), TopTokens((8,), (-1 / 3,))),
        prompt=PromptScores((-1.5, -2.5)),
    )
    error = PromptTooLong("too long", num_tokens=9, limit=8)
    chunks = json.loads(json.dumps([event_chunk(event), error_chunk(error), LAST]))
    assert chunks[0]["token_ids"] == [7, 8], "Dynamo counts them"
    first, second, last = map(read_chunk, chunks)
    assert first == [event]
    assert isinstance(second[0], PromptTooLong)
    assert (str(second[0]), second[0].limit) == ("too long", 8)
    assert last == []


def test_logits_arrive_to_the_bit() -> None:
    row = np.array([1 / 3, -0.0, 1e-40], np.float32)
    (found,) = read_chunk(event_chunk(TokenEvent((1,), logits=(row,))))
    assert isinstance(found, TokenEvent)
    assert found.logits[0].tobytes() == row.tobytes()


def test_a_worker_says_who_it_is() -> None:
    engine = fake_engine()
    frame = asked(hello_fields("demo"))
    assert frame is not None
    assert frame.kind is Kind.HELLO
    info, state = read_hello_chunk(json.loads(json.dumps(hello_chunk(engine))))
    assert (info, state.stats) == (engine.info, engine.stats())
    engine.close()


def test_others_requests_and_chunks_have_nothing_of_ours() -> None:
    assert asked({"token_ids": [1], "extra_args": None}) is None
    assert asked({"token_ids": [1], "extra_args": {"somebody": "else"}}) is None
    with pytest.raises(ProtocolError, match=r"not an llmserve worker, or it is an older version"):
        read_hello_chunk({"token_ids": [1], "index": 0})


def test_another_version_and_nonsense_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr("llmserve.engine.remote.frames.VERSION", 99)
        fields = hello_fields("demo")
    with pytest.raises(ProtocolError, match="99"):
        asked(fields)
    for nonsense in ("no base64!", "AAAA", 7):
        with pytest.raises(ProtocolError):
            asked({"extra_args": {own_requests.KEY: nonsense}})
