"""One event -> the tensors of one response, each with a batch dimension of 1.

    output_ids [1, 1, n], sequence_length [1, 1], cum_log_probs [1, 1], output_log_probs [1, 1, n]   (1 is the beam)
    batch_index, sequence_index, kv_cache_*, *_time_ns                                               [1, 1]
    window_ids [1, w], tail_text, finish_reason [1, 1]                        for postprocessing and the client, ours
    num_prompt_tokens, num_cached_tokens, num_completion_tokens [1, 1]        known in a last event, else 0, ours
    context_logits [1, 0, 0], generation_logits [1, 1, 0, 0]                  always empty: asking for them is refused

Log-probs are 0 unless the request asked for them. Blocks and times are 0 until the last event, where they are real
however the answer ended; only a request that was stopped from outside has no times.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from llmserve.core import Usage
from llmserve.serving.types import Tensor
from llmserve.stages.generate import GeneratedEvent


def response_tensors(
    event: GeneratedEvent, *, echo: Sequence[int], tokens_per_block: int, wanted: Collection[str]
) -> tuple[Tensor, ...]:
    """`echo`: prompt ids to put before the output's. `wanted`: names of outputs, all when empty."""
    usage = event.tokens.usage
    made = (*_token_outputs(event, echo), *(_usage_outputs(usage, tokens_per_block) if usage else NO_USAGE))
    return tuple(tensor for tensor in made if tensor.name in wanted) if wanted else made


def _token_outputs(event: GeneratedEvent, echo: Sequence[int]) -> tuple[Tensor, ...]:
    tokens = event.tokens
    ids = [*echo, *tokens.token_ids]
    log_probs = tokens.log_probs or [0.0] * len(tokens.token_ids)
    return (
        Tensor("output_ids", "INT32", np.array([[ids]], np.int32)),
        _int("sequence_length", len(ids)),
        Tensor("cum_log_probs", "FP32", np.array([[tokens.cum_log_prob]], np.float32)),
        Tensor("output_log_probs", "FP32", np.array([[log_probs]], np.float32)),
        BATCH_INDEX,
        *NO_LOGITS,
        _int("sequence_index", tokens.sequence_index),
        Tensor("window_ids", "INT32", np.array([event.window_ids], np.int32)),
        _text("tail_text", event.tail_text),
        _text("finish_reason", tokens.finish_reason.value if tokens.finish_reason else ""),
    )


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
