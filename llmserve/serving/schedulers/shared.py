"""What all models of a server share."""

from __future__ import annotations

from dataclasses import dataclass

from llmserve.serving.observe.metrics_settings import DEFAULT_METRICS, MetricsSettings
from llmserve.serving.schedulers.rate_limiter import RateLimiter
from llmserve.serving.schedulers.response_cache import ResponseCache


@dataclass(frozen=True, slots=True)
class SharedResources:
    cache: ResponseCache | None = None
    rate_limiter: RateLimiter | None = None
    metrics: MetricsSettings = DEFAULT_METRICS


NOTHING_SHARED = SharedResources()
