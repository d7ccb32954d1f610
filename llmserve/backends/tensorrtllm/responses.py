"""The events of one response -> its tensors, each with a batch dimension of 1.

    output_ids [1, b, n], sequence_length [1, b], cum_log_probs [1, b], output_log_probs [1, b, n]   (b beams, mostly 1)
    batch_index, sequence_index, kv_cache_*, *_time_ns                                               [1, 1]
    window_ids [1, w], tail_text, finish_reason, stop_word [1, 1]             for postprocessing and the client, ours
    num_prompt_tokens, num_cached_tokens, num_completion_tokens, warning, receipt [1, 1]                        ours
    output_top_ids, output_top_log_probs [1, n, k]                            the k most likely tokens at each, ours
    prompt_log_probs [1, p - 1], prompt_top_ids, prompt_top_log_probs [1, p - 1, k]   of p tokens, after the first; ours
    context_logits [1, p, v], generation_logits [1, b, n, v]

A request that names its outputs gets them in every response. Log-probs are 0, and other optional outputs are empty,
unless the request enabled them; counts, blocks and times are 0 until the last event. A request that names none gets
only outputs with information: what it enabled (for the prompt, in the first response of sequence 0); in the last event
also counts, blocks and times, which are valid however the answer ended (only a cancelled request has no times), and a
warning and a receipt if there are any. Outputs that a later step of an ensemble reads are in every response.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.core import GenerateRequest, PromptScores, TopTokens, Usage
from llmserve.serving.types import Tensor
from llmserve.stages.generate import GeneratedEvent

NOTHING_YET = Usage(0, 0, 0, 0, 0, 0, 0)
MAX_SHARED = 4096  # numbers and texts whose tensors are cached: lengths, indices and reasons repeat often


@dataclass(slots=True)
class ResponseEvents:
    """The content of one response: one event, or one of each beam, the best first."""

    beams: Sequence[GeneratedEvent]
    echo: Sequence[int] = ()  # prompt ids before the output's
    tokens_per_block: int = 0
    asked: Collection[str] = ()  # outputs that the request enabled: see `asked_outputs`
    warning: str = ""  # warnings for the client about its request
    receipt: str = ""  # for a sequence that ends, if requested: see `stages.receipt`

    @property
    def prompt(self) -> PromptScores:
        return self.beams[0].tokens.prompt or NOTHING_OF_PROMPT

    @property
    def usage(self) -> Usage:
        return self.beams[0].tokens.usage or NOTHING_YET

    @property
    def num_blocks(self) -> int:
        usage, size = self.usage, self.tokens_per_block
        return -(-(usage.prompt_tokens + usage.completion_tokens) // size) if size else 0

    @property
    def acceptance_rate(self) -> float:
        usage = self.usage
        return usage.accepted_tokens / usage.drafted_tokens if usage.drafted_tokens else 0.0

    @property
    def num_new(self) -> int:
        return self.num_blocks - self.num_reused

    @property
    def num_reused(self) -> int:
        return self.usage.cached_tokens // self.tokens_per_block if self.tokens_per_block else 0


def asked_outputs(request: GenerateRequest) -> tuple[str, ...]:
    """Outputs that have information in this request's responses only because it enabled them."""
    has_top = request.num_top_log_probs > 0
    names = (
        (LOG_PROBS, request.return_log_probs),
        (TOP, has_top),
        (PROMPT_LOG_PROBS, request.return_prompt_log_probs),
        (PROMPT_TOP, request.return_prompt_log_probs and has_top),
        (CONTEXT_LOGITS, request.return_context_logits),
        (GENERATION_LOGITS, request.return_generation_logits),
    )
    return tuple([name for group, is_asked in names if is_asked for name in group])


def response_tensors(
    events: ResponseEvents, wanted: Collection[str] = (), needed: Collection[str] = ()
) -> tuple[Tensor, ...]:
    """`wanted`: names of outputs; empty: the informative ones and the `needed` ones. In the order of MAKERS."""
    if wanted:
        return tuple([make(events) for name, make in MAKERS.items() if name in wanted])
    names = ALWAYS_TOLD if events.beams[0].tokens.usage is None else TOLD_AT_THE_END
    if needed or events.asked or events.warning or events.receipt:
        has_prompt = events.beams[0].tokens.prompt is not None
        also = {name for name in events.asked if has_prompt or name not in OF_PROMPT}
        also |= {name for name in ("warning", "receipt") if getattr(events, name)}
        also.update(needed)
        return tuple([make(events) for name, make in MAKERS.items() if name in names or name in also])
    return tuple([MAKERS[name](events) for name in names])


def _output_ids(events: ResponseEvents) -> Tensor:
    rows = [[*events.echo, *beam.tokens.token_ids] for beam in events.beams]
    return Tensor("output_ids", "INT32", _padded(rows, np.int32))


def _sequence_length(events: ResponseEvents) -> Tensor:
    lengths = [len(events.echo) + len(beam.tokens.token_ids) for beam in events.beams]
    if len(lengths) == 1:
        return _int("sequence_length", lengths[0])
    return Tensor("sequence_length", "INT32", np.array([lengths], np.int32))


def _cum_log_probs(events: ResponseEvents) -> Tensor:
    values = [beam.tokens.cum_log_prob for beam in events.beams]
    return Tensor("cum_log_probs", "FP32", np.array([values], np.float32))


def _output_log_probs(events: ResponseEvents) -> Tensor:
    rows = [beam.tokens.log_probs or [0.0] * len(beam.tokens.token_ids) for beam in events.beams]
    return Tensor("output_log_probs", "FP32", _padded(rows, np.float32))


def _top_ids(name: str, top: Sequence[TopTokens], num_rows: int) -> Tensor:
    """[1, rows, k]; k is 0 if not requested."""
    data = np.array([each.ids for each in top], np.int32) if top else np.zeros((num_rows, 0), np.int32)
    return Tensor(name, "INT32", data[None])


def _top_log_probs(name: str, top: Sequence[TopTokens], num_rows: int) -> Tensor:
    data = np.array([each.log_probs for each in top], np.float32) if top else np.zeros((num_rows, 0), np.float32)
    return Tensor(name, "FP32", data[None])


def _top(events: ResponseEvents) -> tuple[Sequence[TopTokens], int]:
    tokens = events.beams[0].tokens
    return tokens.top, len(tokens.token_ids)


def _prompt_top(events: ResponseEvents) -> tuple[Sequence[TopTokens], int]:
    return events.prompt.top, len(events.prompt.log_probs)


def _context_logits(events: ResponseEvents) -> Tensor:
    pieces = events.prompt.logits
    return Tensor("context_logits", "FP32", np.concatenate(pieces)[None]) if pieces else NO_CONTEXT_LOGITS


def _generation_logits(events: ResponseEvents) -> Tensor:
    rows = events.beams[0].tokens.logits
    return Tensor("generation_logits", "FP32", np.stack(rows)[None, None]) if rows else NO_GENERATION_LOGITS


def _window_ids(events: ResponseEvents) -> Tensor:
    return Tensor("window_ids", "INT32", np.array([events.beams[0].window_ids], np.int32))


def _finish_reason(events: ResponseEvents) -> Tensor:
    reason = events.beams[0].tokens.finish_reason
    return _text("finish_reason", reason.value if reason else "")


def _padded(rows: Sequence[Sequence[float]], kind: type[np.generic]) -> NDArray[Any]:
    """[1, rows, longest], with zeros at the end of shorter rows."""
    if len(rows) == 1:
        return np.array([[rows[0]]], kind)
    padded = np.zeros((1, len(rows), max(map(len, rows))), kind)
    for index, row in enumerate(rows):
        padded[0, index, : len(row)] = row
    return padded


@lru_cache(MAX_SHARED)
def _int(name: str, value: int) -> Tensor:
    return _shared(name, "INT32", np.array([[value]], np.int32))


@lru_cache(MAX_SHARED)
def _text(name: str, value: str) -> Tensor:
    return _shared(name, "BYTES", np.array([[value.encode()]], dtype=object))


def _time(name: str, value: int) -> Tensor:
    return Tensor(name, "INT64", np.array([[value]], np.int64))


def _shared(name: str, datatype: str, data: NDArray[Any]) -> Tensor:
    """Shared by many responses, so it must not be changed."""
    data.setflags(write=False)
    return Tensor(name, datatype, data)


NOTHING_OF_PROMPT = PromptScores()
NO_CONTEXT_LOGITS = _shared("context_logits", "FP32", np.zeros((1, 0, 0), np.float32))
NO_GENERATION_LOGITS = _shared("generation_logits", "FP32", np.zeros((1, 1, 0, 0), np.float32))

MAKERS: Mapping[str, Callable[[ResponseEvents], Tensor]] = {  # in the order of config.pbtxt
    "output_ids": _output_ids,
    "sequence_length": _sequence_length,
    "cum_log_probs": _cum_log_probs,
    "output_log_probs": _output_log_probs,
    "output_top_ids": lambda events: _top_ids("output_top_ids", *_top(events)),
    "output_top_log_probs": lambda events: _top_log_probs("output_top_log_probs", *_top(events)),
    "prompt_log_probs": lambda events: Tensor(
        "prompt_log_probs", "FP32", np.array([events.prompt.log_probs], np.float32)
    ),
    "prompt_top_ids": lambda events: _top_ids("prompt_top_ids", *_prompt_top(events)),
    "prompt_top_log_probs": lambda events: _top_log_probs("prompt_top_log_probs", *_prompt_top(events)),
    "context_logits": _context_logits,
    "generation_logits": _generation_logits,
    "batch_index": lambda events: _int("batch_index", 0),
    "sequence_index": lambda events: _int("sequence_index", events.beams[0].tokens.sequence_index),
    "kv_cache_alloc_new_blocks": lambda events: _int(
        "kv_cache_alloc_new_blocks", events.num_blocks - events.num_reused
    ),
    "kv_cache_reused_blocks": lambda events: _int("kv_cache_reused_blocks", events.num_reused),
    "kv_cache_alloc_total_blocks": lambda events: _int("kv_cache_alloc_total_blocks", events.num_blocks),
    "arrival_time_ns": lambda events: _time("arrival_time_ns", events.usage.arrival_ns),
    "first_scheduled_time_ns": lambda events: _time("first_scheduled_time_ns", events.usage.first_scheduled_ns),
    "first_token_time_ns": lambda events: _time("first_token_time_ns", events.usage.first_token_ns),
    "last_token_time_ns": lambda events: _time("last_token_time_ns", events.usage.last_token_ns),
    "acceptance_rate": lambda events: Tensor(
        "acceptance_rate", "FP32", np.array([[events.acceptance_rate]], np.float32)
    ),
    "total_accepted_draft_tokens": lambda events: _int("total_accepted_draft_tokens", events.usage.accepted_tokens),
    "total_draft_tokens": lambda events: _int("total_draft_tokens", events.usage.drafted_tokens),
    "window_ids": _window_ids,
    "tail_text": lambda events: _text("tail_text", events.beams[0].tail_text),
    "finish_reason": _finish_reason,
    "stop_word": lambda events: Tensor(
        "stop_word", "BYTES", np.array([[events.beams[0].stop_string.encode()]], dtype=object)
    ),
    "num_prompt_tokens": lambda events: _int("num_prompt_tokens", events.usage.prompt_tokens),
    "num_cached_tokens": lambda events: _int("num_cached_tokens", events.usage.cached_tokens),
    "num_completion_tokens": lambda events: _int("num_completion_tokens", events.usage.completion_tokens),
    "warning": lambda events: Tensor("warning", "BYTES", np.array([[events.warning.encode()]], dtype=object)),
    "receipt": lambda events: Tensor("receipt", "BYTES", np.array([[events.receipt.encode()]], dtype=object)),
}
LOG_PROBS = ("cum_log_probs", "output_log_probs")
TOP = ("output_top_ids", "output_top_log_probs")
PROMPT_LOG_PROBS = ("prompt_log_probs",)
PROMPT_TOP = ("prompt_top_ids", "prompt_top_log_probs")
CONTEXT_LOGITS = ("context_logits",)
GENERATION_LOGITS = ("generation_logits",)
OF_PROMPT = (*PROMPT_LOG_PROBS, *PROMPT_TOP, *CONTEXT_LOGITS)
ALWAYS_TOLD = (
    "output_ids", "sequence_length", "batch_index", "sequence_index", "window_ids", "tail_text", "finish_reason",
)  # fmt: skip
UNKNOWN_OR_EMPTY = (
    *LOG_PROBS, *TOP, *OF_PROMPT, *GENERATION_LOGITS, "stop_word", "warning", "receipt",
)  # fmt: skip
TOLD_AT_THE_END = tuple(name for name in MAKERS if name not in UNKNOWN_OR_EMPTY)
