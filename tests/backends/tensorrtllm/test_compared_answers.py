"""Which requests two engines have to answer alike, and what of two answers has to be equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmserve.backends.tensorrtllm.compared_answers import answer_reader
from llmserve.engine.fake import fake_engine
from llmserve.serving.types import InferRequest, InferResponse, Tensor
from tests.backends.tensorrtllm.models import instance_over, request, responses


def answer(*pieces: Any, wanted: InferRequest | None = None) -> Any:
    """Of responses that hold (tokens, finish reason, sequence)."""
    reader = answer_reader(wanted or request([1]))
    assert reader is not None
    for tokens, reason, index in pieces:
        outputs = (
            Tensor("output_ids", "INT32", np.array([[tokens]], np.int32)),
            Tensor("finish_reason", "BYTES", np.array([[reason.encode()]], object)),
            Tensor("sequence_index", "INT32", np.array([[index]], np.int32)),
            Tensor("arrival_time_ns", "INT64", np.array([[np.random.default_rng().integers(99)]])),
        )
        reader.add(InferResponse("m", "1", "", outputs))
    reader.add(InferResponse("m", "1", "", final=True))
    return reader.answer()


@pytest.mark.parametrize(
    ("sampling", "compared"),
    [
        ({}, True),
        ({"runtime_top_k": 1}, True),
        ({"temperature": 0.7}, True),  # neither top_k nor top_p: the likeliest token wins
        ({"runtime_top_k": 5}, False),
        ({"runtime_top_p": 0.9}, False),
        ({"min_p": 0.1}, False),
        ({"runtime_top_p": 0.9, "temperature": 0.0}, True),
        ({"runtime_top_k": 5, "seed": 3}, True),
        ({"runtime_top_k": 5, "random_seed": 3}, True),
    ],
)
def test_draws_without_a_seed_are_not_compared(sampling: dict[str, Any], compared: bool) -> None:
    assert (answer_reader(request([1], **sampling)) is not None) == compared


def test_outputs_that_do_not_tell_the_tokens_are_not_compared() -> None:
    def asking(*names: str, **values: Any) -> InferRequest:
        sent = request([1], **values)
        return InferRequest(sent.model_name, sent.inputs, requested_outputs=names)

    assert answer_reader(asking("sequence_length")) is None
    assert answer_reader(asking("output_ids")) is not None
    assert answer_reader(asking("output_ids", num_return_sequences=2)) is None
    assert answer_reader(asking("output_ids", "sequence_index", num_return_sequences=2)) is not None


def test_tokens_and_reasons_count_and_how_they_were_cut_does_not() -> None:
    whole = answer(([1, 2, 3], "length", 0))
    assert whole == answer(([1], "", 0), ([2, 3], "", 0), ([], "length", 0))
    assert whole != answer(([1, 2, 4], "length", 0))
    assert whole != answer(([1, 2, 3], "end_id", 0))
    assert answer(([1], "length", 0), ([2], "length", 1)) == answer(([2], "length", 1), ([1], "length", 0))
    assert answer(([1], "length", 0), ([2], "length", 1)) != answer(([2], "length", 0), ([1], "length", 1))


@pytest.mark.parametrize("reason", ["cancelled", "timed_out"])
def test_an_answer_that_somebody_ended_is_not_compared(reason: str) -> None:
    assert answer(([1], reason, 0)) is None
    assert answer() is None


async def test_the_answers_of_an_engine() -> None:
    found = []
    for sent in (request([1, 2, 3]), request([1, 2, 3], streaming=True), request([1, 2, 4])):
        reader = answer_reader(sent)
        assert reader is not None
        for response in await responses(instance_over(fake_engine()), sent):
            reader.add(response)
        found.append(reader.answer())
    assert None not in found
    assert found[0] != found[2]
