"""Resources that all models of a server share."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmserve.serving.instruments.metrics_settings import DEFAULT_METRICS, MetricsSettings
from llmserve.serving.schedulers.loop_turn import LoopTurn
from llmserve.serving.schedulers.rate_limiter import RateLimiter
from llmserve.serving.schedulers.response_cache import ResponseCache


@dataclass(frozen=True, slots=True)
class SharedResources:
    cache: ResponseCache | None = None
    rate_limiter: RateLimiter | None = None
    metrics: MetricsSettings = DEFAULT_METRICS
    inline: bool = True  # whether pure and brief executions may run on the loop
    turn: LoopTurn = field(default_factory=LoopTurn)


NOTHING_SHARED = SharedResources()
