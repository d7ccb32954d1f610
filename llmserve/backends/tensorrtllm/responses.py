"""The events of one response -> its tensors, each with a batch dimension of 1.

    output_ids [1, b, n], sequence_length [1, b], cum_log_probs [1, b], output_log_probs [1, b, n]   (b beams, mostly 1)
    batch_index, sequence_index, kv_cache_*, *_time_ns                                               [1, 1]
    window_ids [1, w], tail_text, finish_reason [1, 1]                        for postprocessing and the client, ours
    num_prompt_tokens, num_cached_tokens, num_completion_tokens [1, 1]        known in a last event, else 0, ours
    context_logits [1, 0, 0], generation_logits [1, 1, 0, 0]                  always empty: asking for them is refused

Log-probs are 0 unless the request asked for them. Blocks and times are 0 until the last event, where they are real
however the answer ended; only a request that was stopped from outside has no times.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.core import Usage
from llmserve.serving.types import Tensor
from llmserve.stages.generate import GeneratedEvent


def response_tensors(
    beams: Sequence[GeneratedEvent], *, echo: Sequence[int], tokens_per_block: int, wanted: Collection[str]
) -> tuple[Tensor, ...]:
    """`beams`: one event, or one of each beam, the best first. `echo`: prompt ids to put before the output's.

    `wanted`: names of outputs, all when empty.
    """
    usage = beams[0].tokens.usage
    made = (*_token_outputs(beams, echo), *(_usage_outputs(usage, tokens_per_block) if usage else NO_USAGE))
    return tuple(tensor for tensor in made if tensor.name in wanted) if wanted else made


def _token_outputs(beams: Sequence[GeneratedEvent], echo: Sequence[int]) -> tuple[Tensor, ...]:
    best = beams[0]
    ids = [[*echo, *beam.tokens.token_ids] for beam in beams]
    log_probs = [beam.tokens.log_probs or [0.0] * len(beam.tokens.token_ids) for beam in beams]
    cum_log_probs = [beam.tokens.cum_log_prob for beam in beams]
    return (
        Tensor("output_ids", "INT32", _padded(ids, np.int32)),
        Tensor("sequence_length", "INT32", np.array([[len(row) for row in ids]], np.int32)),
        Tensor("cum_log_probs", "FP32", np.array([cum_log_probs], np.float32)),
        Tensor("output_log_probs", "FP32", _padded(log_probs, np.float32)),
        BATCH_INDEX,
        *NO_LOGITS,
        _int("sequence_index", best.tokens.sequence_index),
        Tensor("window_ids", "INT32", np.array([best.window_ids], np.int32)),
        _text("tail_text", best.tail_text),
        _text("finish_reason", best.tokens.finish_reason.value if best.tokens.finish_reason else ""),
    )


def _padded(rows: Sequence[Sequence[float]], kind: type[np.generic]) -> NDArray[Any]:
    """[1, rows, longest], zeros at the end of shorter rows."""
    if len(rows) == 1:
        return np.array([[rows[0]]], kind)
    padded = np.zeros((1, len(rows), max(map(len, rows))), kind)
    for index, row in enumerate(rows):
        padded[0, index, : len(row)] = row
    return padded


def _usage_outputs(usage: Usage, tokens_per_block: int) -> tuple[Tensor, ...]:
    num_blocks = -(-(usage.prompt_tokens + usage.completion_tokens) // tokens_per_block) if tokens_per_block else 0
    num_reused = usage.cached_tokens // tokens_per_block if tokens_per_block else 0
    return (
        _int("num_prompt_tokens", usage.prompt_tokens),
        _int("num_cached_tokens", usage.cached_tokens),
        _int("num_completion_tokens", usage.completion_tokens),
        _int("kv_cache_alloc_new_blocks", num_blocks - num_reused),
        _int("kv_cache_reused_blocks", num_reused),
        _int("kv_cache_alloc_total_blocks", num_blocks),
        _time("arrival_time_ns", usage.arrival_ns),
        _time("first_scheduled_time_ns", usage.first_scheduled_ns),
        _time("first_token_time_ns", usage.first_token_ns),
        _time("last_token_time_ns", usage.last_token_ns),
        Tensor("acceptance_rate", "FP32", np.zeros((1, 1), np.float32)),  # of draft tokens: there are none
        _int("total_accepted_draft_tokens", 0),
        _int("total_draft_tokens", 0),
    )


def _int(name: str, value: int) -> Tensor:
    return Tensor(name, "INT32", np.array([[value]], np.int32))


def _time(name: str, value: int) -> Tensor:
    return Tensor(name, "INT64", np.array([[value]], np.int64))


def _text(name: str, value: str) -> Tensor:
    return Tensor(name, "BYTES", np.array([[value.encode()]], dtype=object))


# The same in every event but the last: made once.
BATCH_INDEX = _int("batch_index", 0)
NO_LOGITS = (
    Tensor("context_logits", "FP32", np.zeros((1, 0, 0), np.float32)),
    Tensor("generation_logits", "FP32", np.zeros((1, 1, 0, 0), np.float32)),
)
NO_USAGE = _usage_outputs(Usage(0, 0, 0, 0, 0, 0, 0), 0)
