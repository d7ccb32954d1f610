"""Histograms of the times and lengths of answers for `/metrics`, recorded when each answer ends."""

from __future__ import annotations

import time
from collections.abc import Mapping

from llmserve.core import Usage
from llmserve.serving.instruments.latencies import Histogram

NS_PER_S = 1e9
# up to the time of a long prompt on a laptop
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
SECONDS_OF_A_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)

FIRST_TOKEN = "llmserve_time_to_first_token_seconds"
NEXT_TOKENS = "llmserve_time_per_output_token_seconds"
WHOLE = "llmserve_e2e_request_latency_seconds"
QUEUE = "llmserve_request_queue_time_seconds"
PROMPT = "llmserve_request_prompt_tokens"
OUTPUT = "llmserve_request_generation_tokens"
BOUNDS: Mapping[str, tuple[float, ...]] = {
    FIRST_TOKEN: SECONDS, NEXT_TOKENS: SECONDS_OF_A_TOKEN, WHOLE: SECONDS, QUEUE: SECONDS, PROMPT: TOKENS,
    OUTPUT: TOKENS,
}  # fmt: skip


class AnswerHistograms:
    """For one model since it was loaded."""

    def __init__(self) -> None:
        self.by_name: Mapping[str, Histogram] = {name: Histogram(bounds) for name, bounds in BOUNDS.items()}

    def record(self, usage: Usage) -> None:
        """Record an answer that has just ended. Times that its engine does not know are zero, and left out."""
        observe = self._observe
        observe(PROMPT, usage.prompt_tokens)
        observe(OUTPUT, usage.completion_tokens)
        if not usage.arrival_ns:
            return
        observe(WHOLE, (time.time_ns() - usage.arrival_ns) / NS_PER_S)
        if usage.first_scheduled_ns:
            observe(QUEUE, (usage.first_scheduled_ns - usage.arrival_ns) / NS_PER_S)
        if usage.first_token_ns:
            observe(FIRST_TOKEN, (usage.first_token_ns - usage.arrival_ns) / NS_PER_S)
            if usage.completion_tokens > 1:
                steps = usage.completion_tokens - 1
                observe(NEXT_TOKENS, (usage.last_token_ns - usage.first_token_ns) / NS_PER_S / steps)

    def _observe(self, name: str, value: float) -> None:
        self.by_name[name].observe(max(0.0, value))  # clocks may be changed
