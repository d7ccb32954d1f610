"""Statistics of an answer: tokens, speed, and the model's confidence."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from llmserve.client import TextDelta

NUM_UNSURE = 3  # pieces that are shown


@dataclass(slots=True)
class AnswerStatistics:
    started: float = field(default_factory=time.perf_counter)
    first: float | None = None  # when the first text came
    last: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = ""
    sum_log_probs: float = 0.0
    num_log_probs: int = 0
    pieces: list[tuple[float, str]] = field(default_factory=list)  # of text, with the log prob of its tokens

    def add(self, delta: TextDelta) -> None:
        if delta.text:
            self.last = time.perf_counter()
            self.first = self.last if self.first is None else self.first
        if delta.completion_tokens:
            self.prompt_tokens, self.cached_tokens = delta.prompt_tokens, delta.cached_tokens
            self.completion_tokens = delta.completion_tokens
        self.finish_reason = delta.finish_reason or self.finish_reason
        if delta.log_probs:
            total = sum(delta.log_probs)
            self.sum_log_probs += total
            self.num_log_probs += len(delta.log_probs)
            if delta.text.strip():
                self.pieces.append((total, delta.text))

    def speed(self) -> str:
        if self.first is None:
            return "no answer yet"
        cached = f" ({self.cached_tokens} of them in the cache)" if self.cached_tokens else ""
        counts = (
            f"{self.prompt_tokens} tokens{cached} -> {self.completion_tokens} tokens" if self.completion_tokens else ""
        )
        told = [counts, f"first after {1e3 * (self.first - self.started):.0f} ms"]
        if self.completion_tokens > 1 and self.last > self.first:
            told.append(f"{(self.completion_tokens - 1) / (self.last - self.first):.1f} tokens/s")
        told.append({"length": "cut at max_tokens"}.get(self.finish_reason, ""))
        return ", ".join(filter(None, told))

    def sureness(self) -> str:
        """The model's confidence as text; empty without log probs."""
        if not self.num_log_probs:
            return ""
        mean = self.sum_log_probs / self.num_log_probs
        unsure = sorted(self.pieces)[:NUM_UNSURE]
        shown = ", ".join(f"{text.strip()!r} {math.exp(log_prob):.1%}" for log_prob, text in unsure)
        return f"probability {math.exp(mean):.1%} a token on average; least sure: {shown}"
