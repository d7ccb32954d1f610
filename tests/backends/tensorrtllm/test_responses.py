"""The tensors of a response with several beams; those with one are tested with the backend."""

from __future__ import annotations

from llmserve.backends.tensorrtllm.responses import LOG_PROBS, ResponseEvents, response_tensors
from llmserve.core import FinishReason, TokenEvent
from llmserve.stages.generate import GeneratedEvent


def test_beams_are_rows_padded_to_the_longest() -> None:
    beams = [
        GeneratedEvent(TokenEvent((5, 6, 7), (-0.5, -0.5, -0.5), -1.5, 0, FinishReason.LENGTH), ()),
        GeneratedEvent(TokenEvent((8,), (-2.0,), -2.0, 1, FinishReason.END_ID), ()),
    ]
    made = {
        tensor.name: tensor.data.tolist()
        for tensor in response_tensors(ResponseEvents(beams, (1, 2), tokens_per_block=8, asked=LOG_PROBS))
    }
    assert made["output_ids"] == [[[1, 2, 5, 6, 7], [1, 2, 8, 0, 0]]]
    assert made["sequence_length"] == [[5, 3]]
    assert made["cum_log_probs"] == [[-1.5, -2.0]]
    assert made["output_log_probs"] == [[[-0.5, -0.5, -0.5], [-2.0, 0.0, 0.0]]]
    assert made["finish_reason"] == [[b"length"]]
