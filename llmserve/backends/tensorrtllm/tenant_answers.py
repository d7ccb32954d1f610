"""Adds the answers to one request to its tenant's counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from llmserve.backends.tensorrtllm.answer import ResponseBuilder
from llmserve.backends.tensorrtllm.answer_histograms import NS_PER_S
from llmserve.core import GenerateRequest, Usage
from llmserve.errors import LlmserveError

Ended: TypeAlias = Callable[[Usage], None]  # called for each answer that has ended


@contextmanager
def counted(answer: ResponseBuilder, request: GenerateRequest, model: str) -> Iterator[Ended]:
    """Counts the tokens at the end of the block, even if the client gave up; nothing for a refused request."""
    if request.tenant.counters is None:
        yield lambda usage: None
        return
    counters = request.tenant.counters.answers[model]

    def ended(usage: Usage) -> None:
        counters.num_preemptions += usage.num_preemptions
        if usage.arrival_ns and usage.first_scheduled_ns:
            counters.num_queued += 1
            counters.queue_s += max(0, usage.first_scheduled_ns - usage.arrival_ns) / NS_PER_S  # clocks may be changed

    is_refused = False
    try:
        yield ended
    except LlmserveError:
        is_refused = not answer.has_begun
        raise
    finally:
        if not is_refused:
            counters.prompt_tokens += len(request.prompt_ids)
            counters.generation_tokens += answer.num_tokens
