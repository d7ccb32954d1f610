"""What one tenant has done, as counters: the owner of an API key is one.

Everything happens on the event loop, so nothing is locked. Whoever answers a request of the tenant counts here;
`/metrics` reads.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

SUCCEEDED, FAILED, CANCELLED = OUTCOMES = ("succeeded", "failed", "cancelled")
MAX_ANSWERS, TOKENS_PER_MINUTE, SERVER = LIMITS = ("max_answers", "tokens_per_minute", "server")  # server: it is full


@dataclass(slots=True)
class RequestCounters:
    """Requests to one model. Each that has ended has one of the outcomes, or was refused by one of the limits."""

    num_in_flight: int = 0
    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    refusals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LIMITS, 0))


@dataclass(slots=True)
class AnswerCounters:
    """Answers of one language model, counted when they end."""

    prompt_tokens: int = 0  # once for each request, whether they were computed or found in the prefix cache
    generation_tokens: int = 0
    num_queued: int = 0  # answers whose time in the queue is known
    queue_s: float = 0.0  # of all of them together
    num_preemptions: int = 0


@dataclass(slots=True)
class TenantCounters:
    """By the name of the model."""

    requests: defaultdict[str, RequestCounters] = field(default_factory=lambda: defaultdict(RequestCounters))
    answers: defaultdict[str, AnswerCounters] = field(default_factory=lambda: defaultdict(AnswerCounters))
