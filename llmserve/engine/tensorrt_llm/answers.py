"""Converts one sequence of TensorRT-LLM's tokens to our events.

The library leaves a stop word's tokens in the answer, and some releases also leave the end token; our answers have
neither. So tokens that may begin a stop word wait for the next ones.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmserve.core import FinishReason, GenerateRequest, TokenEvent, Usage
from llmserve.scheduler.words import StopWords


@dataclass(frozen=True, slots=True)
class Measured:
    """The library's numbers for a request that has ended."""

    cached_tokens: int = 0
    queue_ns: int = 0  # from arrival to the first step


class SequenceAnswer:
    """`index`: the sequence's index in its request."""

    def __init__(self, request: GenerateRequest, index: int) -> None:
        self._index = index
        self._end_id = request.end_id
        self._num_exempt = request.sampling.min_tokens  # no stop word reaches into the first so many
        self._stop_words = StopWords(request.stop_ids)
        self._wants_log_probs = request.return_log_probs
        self._tokens: list[int] = []
        self._log_probs: list[float] = []
        self._num_emitted = 0
        now = time.time_ns()
        self._usage = Usage(len(request.prompt_ids), 0, 0, now, 0, 0, 0)
        self.is_over = False

    @property
    def num_tokens(self) -> int:
        """Received so far."""
        return len(self._tokens)

    def add(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float],
        reason: FinishReason | None,
        measured: Measured | None = None,
    ) -> TokenEvent | None:
        """What to pass on now; None if all of it must wait. A stop word ends the answer, whoever finds it."""
        if reason is FinishReason.END_ID and tokens and tokens[-1] == self._end_id:
            tokens, log_probs = tokens[:-1], log_probs[: len(tokens) - 1]
        self._note_times(bool(tokens), measured or Measured())
        for position, token in enumerate(tokens):
            self._tokens.append(token)
            self._log_probs.append(log_probs[position] if position < len(log_probs) else 0.0)
            if num_matched := self._stop_words.num_matched(self._tail()):
                del self._tokens[-num_matched:], self._log_probs[-num_matched:]
                return self._event(len(self._tokens), FinishReason.STOP_WORDS)
        num_ready = len(self._tokens) - (0 if reason else self._stop_words.num_begun(self._tail()))
        if num_ready <= self._num_emitted and reason is None:
            return None
        return self._event(num_ready, reason)

    def _tail(self) -> tuple[int, ...]:
        start = max(self._num_exempt, len(self._tokens) - self._stop_words.max_length)
        return tuple(self._tokens[start:])

    def _event(self, end: int, reason: FinishReason | None) -> TokenEvent:
        start, self._num_emitted = self._num_emitted, end
        self.is_over = reason is not None
        self._usage = replace(self._usage, completion_tokens=end)
        return TokenEvent(
            tuple(self._tokens[start:end]),
            log_probs=tuple(self._log_probs[start:end]) if self._wants_log_probs else (),
            cum_log_prob=sum(self._log_probs[:end]),
            sequence_index=self._index,
            finish_reason=reason,
            usage=self._usage if start == 0 or self.is_over else None,
        )

    def _note_times(self, has_tokens: bool, measured: Measured) -> None:
        now = time.time_ns()
        first = self._usage.first_token_ns or (now if has_tokens else 0)
        scheduled = self._usage.arrival_ns + measured.queue_ns if measured.queue_ns else first
        self._usage = replace(
            self._usage,
            cached_tokens=min(measured.cached_tokens, self._usage.prompt_tokens),
            first_token_ns=first,
            first_scheduled_ns=min(scheduled, first or scheduled),
            last_token_ns=now if has_tokens else self._usage.last_token_ns,
        )


def too_late(request: GenerateRequest) -> list[TokenEvent]:
    """All answers to a request whose deadline passed before it started; empty if it is in time."""
    if request.deadline is None or request.deadline > time.monotonic():
        return []
    events = [
        SequenceAnswer(request, index).add((), (), FinishReason.TIMED_OUT) for index in range(request.num_answers)
    ]
    return [event for event in events if event is not None]
