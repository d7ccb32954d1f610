"""The outgoing events of one request: passed on one by one, or gathered into one event per sequence.

Beams are gathered, too, into one response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmserve.core import FinishReason, GenerateRequest, TokenEvent, Usage
from llmserve.stages.generate import GeneratedEvent


class ResponseBuilder:
    """Needs memory for every sequence of `request`, so it is created after the engine's validation."""

    def __init__(self, request: GenerateRequest, *, streaming: bool) -> None:
        self._request = request
        self._streaming = streaming
        self._events: list[list[GeneratedEvent]] = [[] for _ in range(request.num_answers)]
        self._num_tokens = [0] * request.num_answers
        self._open = dict.fromkeys(range(request.num_answers))
        self.has_begun = False

    @property
    def num_tokens(self) -> int:
        """Of all sequences, so far."""
        return sum(self._num_tokens)

    @property
    def is_complete(self) -> bool:
        """Whether every sequence has had its last event."""
        return not self._open

    def open_sequences(self) -> Sequence[int]:
        return tuple(self._open)

    def add(self, event: GeneratedEvent) -> Sequence[GeneratedEvent]:
        """What to send now, as one response; empty while a gathered answer is incomplete."""
        self.has_begun = True
        index = event.tokens.sequence_index
        self._num_tokens[index] += len(event.tokens.token_ids)
        is_last = event.tokens.finish_reason is not None
        if is_last:
            del self._open[index]
        if self._streaming:
            return (event,)
        self._events[index].append(event)
        if self._request.beam is not None:
            return [_joined(beam) for beam in self._events] if self.is_complete else ()
        return (_joined(self._events[index]),) if is_last else ()

    def cancelled(self, index: int) -> Sequence[GeneratedEvent]:
        """The last event of a sequence that was cancelled: the gathered tokens, or no more tokens."""
        usage = Usage(len(self._request.prompt_ids), 0, self._num_tokens[index], 0, 0, 0, 0)
        tokens = TokenEvent((), sequence_index=index, finish_reason=FinishReason.CANCELLED, usage=usage)
        return self.add(GeneratedEvent(tokens, window_ids=()))


def _joined(events: Sequence[GeneratedEvent]) -> GeneratedEvent:
    """One event for a whole sequence. It has no window, because its text starts at the beginning."""
    cum_log_prob = next((e.tokens.cum_log_prob for e in reversed(events) if e.tokens.token_ids), 0.0)
    prompt = next((e.tokens.prompt for e in events if e.tokens.prompt is not None), None)
    tokens = events[-1].tokens.with_tokens([event.tokens for event in events])
    tokens = replace(tokens, cum_log_prob=cum_log_prob, prompt=prompt)
    return replace(events[-1], tokens=tokens, window_ids=())
