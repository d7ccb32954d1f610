"""One event -> the tensors of one response, each with a batch dimension of 1.

    output_ids [1, 1, n], sequence_length [1, 1], cum_log_probs [1, 1], output_log_probs [1, 1, n]   (1 is the beam)
    batch_index, sequence_index, kv_cache_*, *_time_ns                                               [1, 1]
    window_ids [1, w], tail_text, finish_reason [1, 1]                        for postprocessing and the client, ours
    num_prompt_tokens, num_cached_tokens, num_completion_tokens [1, 1]        known in a last event, else 0, ours

Log-probs are 0 unless the request asked for them; blocks and times are 0 until the last event.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from llmserve.core import Usage
from llmserve.serving.types import Tensor
from llmserve.stages.generate import GeneratedEvent

NO_USAGE = Usage(0, 0, 0, 0, 0, 0, 0)


def response_tensors(
    event: GeneratedEvent, *, echo: Sequence[int], tokens_per_block: int, wanted: Collection[str]
) -> tuple[Tensor, ...]:
    """`echo`: prompt ids to put before the output's. `wanted`: names of outputs, all when empty."""
    made = (*_token_outputs(event, echo), *_usage_outputs(event.tokens.usage or NO_USAGE, tokens_per_block))
    return tuple(tensor for tensor in made if not wanted or tensor.name in wanted)


def _token_outputs(event: GeneratedEvent, echo: Sequence[int]) -> Iterator[Tensor]:
    tokens = event.tokens
    ids = [*echo, *tokens.token_ids]
    log_probs = tokens.log_probs or [0.0] * len(tokens.token_ids)
    yield Tensor("output_ids", "INT32", np.array(ids, np.int32).reshape(1, 1, -1))
    yield _int("sequence_length", len(ids))
    yield Tensor("cum_log_probs", "FP32", np.full((1, 1), tokens.cum_log_prob, np.float32))
    yield Tensor("output_log_probs", "FP32", np.array(log_probs, np.float32).reshape(1, 1, -1))
    yield _int("batch_index", 0)
    yield _int("sequence_index", tokens.sequence_index)
    yield Tensor("window_ids", "INT32", np.array(event.window_ids, np.int32).reshape(1, -1))
    yield _text("tail_text", event.tail_text)
    yield _text("finish_reason", tokens.finish_reason.value if tokens.finish_reason else "")


def _usage_outputs(usage: Usage, tokens_per_block: int) -> Iterator[Tensor]:
    num_blocks = -(-(usage.prompt_tokens + usage.completion_tokens) // tokens_per_block) if tokens_per_block else 0
    num_reused = usage.cached_tokens // tokens_per_block if tokens_per_block else 0
    yield _int("num_prompt_tokens", usage.prompt_tokens)
    yield _int("num_cached_tokens", usage.cached_tokens)
    yield _int("num_completion_tokens", usage.completion_tokens)
    yield _int("kv_cache_alloc_new_blocks", num_blocks - num_reused)
    yield _int("kv_cache_reused_blocks", num_reused)
    yield _int("kv_cache_alloc_total_blocks", num_blocks)
    yield _int("arrival_time_ns", usage.arrival_ns, "INT64")
    yield _int("first_scheduled_time_ns", usage.first_scheduled_ns, "INT64")
    yield _int("first_token_time_ns", usage.first_token_ns, "INT64")
    yield _int("last_token_time_ns", usage.last_token_ns, "INT64")
    yield Tensor("acceptance_rate", "FP32", np.zeros((1, 1), np.float32))  # of draft tokens: there are none
    yield _int("total_accepted_draft_tokens", 0)
    yield _int("total_draft_tokens", 0)


def _int(name: str, value: int, datatype: str = "INT32") -> Tensor:
    dtype: Any = np.int64 if datatype == "INT64" else np.int32
    return Tensor(name, datatype, np.full((1, 1), value, dtype))


def _text(name: str, value: str) -> Tensor:
    return Tensor(name, "BYTES", np.array([[value.encode()]], dtype=object))
