"""What all models of a server share."""

from __future__ import annotations

from dataclasses import dataclass

from llmserve.serving.metrics_settings import DEFAULT_METRICS, MetricsSettings
from llmserve.serving.response_cache import ResponseCache
from llmserve.serving.schedulers.rate_limiter import RateLimiter


@dataclass(frozen=True, slots=True)
class SharedResources:
    cache: ResponseCache | None = None
    rate_limiter: RateLimiter | None = None
    metrics: MetricsSettings = DEFAULT_METRICS


NOTHING_SHARED = SharedResources()
