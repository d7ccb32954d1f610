"""What the contract suite does not show; see `tests/contracts/test_engine.py` for the rest."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from llmserve.core import GenerateRequest, SamplingParams
from llmserve.engine.validation import MAX_WORD_LENGTH, MAX_WORD_TOKENS, check_request
from llmserve.errors import InvalidArgument, PromptTooLong

REQUEST = GenerateRequest("r", (1, 2), SamplingParams(max_tokens=8))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (replace(REQUEST, stop_ids=((1,) * (MAX_WORD_LENGTH + 1),)), "more than 64 tokens"),
        (replace(REQUEST, bad_ids=((1,),) * (MAX_WORD_TOKENS + 1)), "16385 tokens in all"),
        (replace(REQUEST, bad_ids=((0,), (1,), (2,), (1, 3))), "cover the whole vocabulary"),
        (
            replace(REQUEST, sampling=SamplingParams(min_tokens=1), bad_ids=((0,), (1,)), stop_ids=((2,),), end_id=3),
            "cover the whole vocabulary",
        ),
        (replace(REQUEST, deadline=float("nan")), "deadline"),
        (replace(REQUEST, embedding_bias=((2, 1.0), (3, 1.0), (2, 0.5))), "names token 2 more than once"),
        (replace(REQUEST, num_sequences=129), "from 1 to 128"),
        (replace(REQUEST, prompt_ids=(1,) * 10), "at most 9"),
    ],
)
def test_problems(request_: GenerateRequest, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        check_request(request_, vocab_size=4, max_seq_len=10)


def test_valid_requests_pass() -> None:
    check_request(REQUEST, vocab_size=4, max_seq_len=10)
    # the end token may lie outside: such a model never ends by itself
    check_request(replace(REQUEST, end_id=-1, prompt_ids=(1,) * 9), vocab_size=4, max_seq_len=10)
    check_request(replace(REQUEST, bad_ids=((0,), (1,), (2,)), end_id=3), vocab_size=4, max_seq_len=10)
    elsewhere = replace(REQUEST, sampling=SamplingParams(min_tokens=1), bad_ids=((0,), (1,), (2,)), end_id=-1)
    check_request(elsewhere, vocab_size=4, max_seq_len=10)


def test_too_long_a_prompt_says_how_long_whatever_else_is_wrong() -> None:
    sampling = SamplingParams(max_tokens=0)
    with pytest.raises(PromptTooLong, match="max_tokens must be at least 1") as caught:
        check_request(replace(REQUEST, prompt_ids=(1,) * 12, sampling=sampling), vocab_size=4, max_seq_len=10)
    placed = caught.value.at("in ensemble 'e'")
    assert (placed.num_tokens, placed.limit) == (12, 9)
    assert str(placed).startswith("in ensemble 'e', request 'r' is not valid")
    assert pickle.loads(pickle.dumps(placed)).limit == 9
