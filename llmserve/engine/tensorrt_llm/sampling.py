"""Converts our sampling parameters to TensorRT-LLM's; SamplingConfig (1.2) and SamplingParams (1.3) share the names.

A disabled parameter is not passed, so the library's own default applies. Without top_k and top_p, that is the most
likely token, so a draw from the whole vocabulary passes top_p = 1.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from llmserve.core import GenerateRequest, SamplingParams
from llmserve.engine.tensorrt_llm.library import float_tensor
from llmserve.errors import InvalidArgument, Unsupported

MAX_TOP_K = 1024  # of the executor's kernels
OF_SOME_RELEASES = (  # that the PyTorch sampler did not apply from the beginning
    "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "length_penalty", "early_stopping",
    "beam_search_diversity_rate",
)  # fmt: skip
STREAM_STEP = 0x9E3779B97F4A7C15  # between the seeds of one request's sequences
OFF = SamplingParams()
DEFAULT_PRIORITY = 0.5
PRIORITY_STEP = 0.01


def sampling_arguments(params: SamplingParams, *, index: int = 0) -> dict[str, Any]:
    """`index`: of the sequence; each draws from its own random stream."""
    arguments: dict[str, Any] = {}
    if params.is_greedy:
        arguments["top_k"] = 1
    else:
        arguments["top_p"] = float(params.top_p)
        arguments["seed"] = (params.seed + index * STREAM_STEP) % 2**64
        if params.top_k:
            arguments["top_k"] = params.top_k
        for name in ("temperature", "min_p"):
            if getattr(params, name) != getattr(OFF, name):
                arguments[name] = float(getattr(params, name))
    if params.min_tokens:
        arguments["min_tokens"] = params.min_tokens
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        if getattr(params, name) != getattr(OFF, name):
            arguments[name] = float(getattr(params, name))
    return arguments


def beam_arguments(request: GenerateRequest) -> dict[str, Any]:
    """Arguments of beam search, as far as given."""
    beam = request.beam
    if beam is None:
        return {}
    given = {
        "length_penalty": beam.length_penalty,
        "early_stopping": beam.early_stopping,
        "beam_search_diversity_rate": beam.diversity_rate,
    }
    return {name: value for name, value in given.items() if value is not None}


def bias_tensor(request: GenerateRequest, vocab_size: int) -> Any:
    """The addition to each logit, float32 [vocab_size]; None: nothing."""
    if not request.embedding_bias:
        return None
    dense = np.zeros(vocab_size, np.float32)
    for token, value in request.embedding_bias:
        dense[token] += np.float32(value)
    return float_tensor(dense)


def check_top_k(params: SamplingParams) -> None:
    if params.top_k > MAX_TOP_K and not params.is_greedy:
        raise InvalidArgument(f"top_k must be at most {MAX_TOP_K} on this engine, got {params.top_k}")


def check_applied(request: GenerateRequest, applied: Collection[str]) -> None:
    """`applied`: parameters in OF_SOME_RELEASES. Ignored parameters are refused, because the answer would be wrong."""
    asked = sampling_arguments(request.sampling) | beam_arguments(request)
    ignored = [name for name in OF_SOME_RELEASES if name in asked and name not in applied]
    if ignored:
        raise InvalidArgument(
            f"request {request.request_id!r}: the sampler of the installed tensorrt-llm ignores {', '.join(ignored)}; "
            f"leave {'it' if len(ignored) == 1 else 'them'} out, or serve with a newer release"
        )


def check_scores(request: GenerateRequest) -> None:
    """Results that the library is not asked for here are refused by name."""
    wanted = {
        "num_top_log_probs": request.num_top_log_probs > 0,
        "return_prompt_log_probs": request.return_prompt_log_probs,
        "return_context_logits": request.return_context_logits,
        "return_generation_logits": request.return_generation_logits,
        "guided_decoding_guide": request.guide is not None,
    }
    if names := ", ".join(name for name, is_wanted in wanted.items() if is_wanted):
        raise Unsupported(f"request {request.request_id!r}: engines for TensorRT-LLM do not support {names}")


def priority_of(request: GenerateRequest) -> float:
    """Between 0 and 1; our priorities have no bounds, and 0 is the default."""
    return min(1.0, max(0.0, DEFAULT_PRIORITY + PRIORITY_STEP * request.priority))
