"""Dynamo's requests as ours, field by field."""

from __future__ import annotations

from typing import Any

import pytest

from llmserve.cluster.requests import chunk_of, request_of
from llmserve.core import FinishReason, TokenEvent, TopTokens
from llmserve.errors import InvalidArgument

PROMPT = [5, 6, 7]


def asked(migrates: bool = True, **groups: dict[str, Any]) -> Any:
    return request_of({"token_ids": PROMPT, **groups}, "an id", max_seq_len=100, migrates=migrates)


def test_everything_that_a_request_may_say_is_honoured() -> None:
    found = asked(
        sampling_options={
            "n": 1, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125,
            "repetition_penalty": 1.5, "seed": -1, "guided_decoding": None, "use_beam_search": False,
        },
        stop_conditions={"max_tokens": 9, "min_tokens": 2, "stop_token_ids": [4, 2], "stop_token_ids_hidden": [2, 3]},
        output_options={"logprobs": 3},
    )  # fmt: skip
    sampling = found.sampling
    assert found.prompt_ids == tuple(PROMPT)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 7, 0.125)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (9, 2, 2**64 - 1)
    assert sampling.repetition_penalty == 1.5
    assert (found.end_id, found.stop_ids) == (2, ((3,), (4,)))
    assert (found.return_log_probs, found.num_top_log_probs) == (True, 3)


def test_what_is_left_out_means_what_it_means_to_openai() -> None:
    found = asked(sampling_options={"top_k": -1}, stop_conditions={"max_tokens": None, "ignore_eos": True,
                                                                   "stop_token_ids_hidden": [2]})  # fmt: skip
    assert (found.sampling.temperature, found.sampling.top_k, found.sampling.max_tokens) == (1.0, 0, 97)
    assert (found.end_id, found.stop_ids, found.return_log_probs) == (None, (), False)


def test_without_a_seed_every_worker_draws_the_same_for_one_request() -> None:
    first, again = asked(), asked()
    other = request_of({"token_ids": PROMPT}, "another id", max_seq_len=100)
    assert first.sampling.seed == again.sampling.seed != other.sampling.seed


def test_all_that_is_refused_is_said_at_once() -> None:
    with pytest.raises(InvalidArgument) as caught:
        asked(
            sampling_options={"n": 2, "presence_penalty": 0.5, "sparkle": 1, "guided_decoding": {"regex": "a"}},
            output_options={"logprobs": 21, "prompt_logprobs": 1},
        )
    for words in (
        "6 problems", "sparkle is not supported here", "n is not supported: only its first answer would be complete",
        "guided_decoding is not supported", "presence_penalty counts the answer's tokens", "from 0 to 20, got 21",
        "prompt_logprobs is not supported",
    ):  # fmt: skip
        assert words in str(caught.value)


def test_penalties_over_the_answer_are_taken_where_no_stream_moves() -> None:
    found = asked(migrates=False, sampling_options={"presence_penalty": 0.5, "frequency_penalty": 0.25})
    assert (found.sampling.presence_penalty, found.sampling.frequency_penalty) == (0.5, 0.25)


def test_events_become_chunks() -> None:
    event = TokenEvent((8, 9), (-0.5, -1.0), top=(TopTokens((8,), (-0.5,)), TopTokens((1,), (-0.25,))))
    assert chunk_of(event) == {
        "token_ids": [8, 9], "index": 0, "log_probs": [-0.5, -1.0],
        "top_logprobs": [
            [{"rank": 1, "token_id": 8, "token": None, "logprob": -0.5}],
            [{"rank": 1, "token_id": 1, "token": None, "logprob": -0.25}],
        ],
    }  # fmt: skip
    reasons = {
        FinishReason.END_ID: "stop", FinishReason.STOP_WORDS: "stop", FinishReason.LENGTH: "length",
        FinishReason.TIMED_OUT: "cancelled",
    }  # fmt: skip
    for reason, word in reasons.items():
        assert chunk_of(TokenEvent((), (), finish_reason=reason))["finish_reason"] == word
