"""Counters for one tenant, such as the owner of an API key.

Everything runs on the event loop, so there are no locks. The code that answers a request of the tenant counts it here;
`/metrics` reads the counters.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

SUCCEEDED, FAILED, CANCELLED = OUTCOMES = ("succeeded", "failed", "cancelled")
MAX_ANSWERS, TOKENS_PER_MINUTE, SERVER = LIMITS = ("max_answers", "tokens_per_minute", "server")  # server: it is full


@dataclass(slots=True)
class RequestCounters:
    """Requests to one model. A request that ended has one outcome, or was refused by one of the limits."""

    num_in_flight: int = 0
    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    refusals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LIMITS, 0))


@dataclass(slots=True)
class AnswerCounters:
    """Answers of one language model, counted when they end."""

    prompt_tokens: int = 0  # counted once per request, whether computed or found in the prefix cache
    generation_tokens: int = 0
    num_queued: int = 0  # answers with a known queue time
    queue_s: float = 0.0  # total of these
    num_preemptions: int = 0


@dataclass(slots=True)
class TenantCounters:
    """Counters by model name."""

    requests: defaultdict[str, RequestCounters] = field(default_factory=lambda: defaultdict(RequestCounters))
    answers: defaultdict[str, AnswerCounters] = field(default_factory=lambda: defaultdict(AnswerCounters))
