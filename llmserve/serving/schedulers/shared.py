"""What the schedulers of all models of a server share."""

from __future__ import annotations

from dataclasses import dataclass

from llmserve.serving.response_cache import ResponseCache


@dataclass(frozen=True, slots=True)
class SharedResources:
    cache: ResponseCache | None = None
