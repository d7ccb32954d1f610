"""Failover of an answer: another worker computes it again from its beginning, and sending resumes where it stopped.

Engines are deterministic, so the new worker repeats the tokens that were sent. They are compared anyway, because a text
from two different engines would not be noticed. Everything that an answer depends on is unchanged: penalties, minimum
numbers of tokens, guides, other answers of the request. That does not hold if the answer's tokens are appended to the
prompt instead.
"""

from __future__ import annotations

from dataclasses import replace

from llmserve.core import TokenEvent, Usage
from llmserve.errors import Unavailable


class Said:
    """The tokens of each answer that were sent to the reader of one request."""

    def __init__(self, num_answers: int) -> None:
        self._tokens: list[list[int]] = [[] for _ in range(num_answers)]
        self._places = [0] * num_answers  # in the current worker's answers
        self._has_ended = [False] * num_answers
        self._first_usage: dict[int, Usage] = {}
        self._has_prompt = False

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._tokens))

    @property
    def is_complete(self) -> bool:
        return all(self._has_ended)

    def begin_again(self) -> None:
        """A new worker sends everything again from here on."""
        self._places = [0] * len(self._places)

    def news(self, event: TokenEvent) -> TokenEvent | None:
        """The new part of the event; None: it has none. Raises `Unavailable` if it differs from what was sent."""
        index, token_ids = event.sequence_index, event.token_ids
        told, place = self._tokens[index], self._places[index]
        num_again = min(len(token_ids), max(0, len(told) - place))
        more = token_ids[num_again:]
        ends_early = event.finish_reason is not None and place + len(token_ids) < len(told)
        goes_on = self._has_ended[index] and bool(more)
        if list(token_ids[:num_again]) != told[place : place + num_again] or ends_early or goes_on:
            raise Unavailable(
                f"the stream cannot fail over: after {len(told)} tokens the new worker computes different ones "
                "(compare the kernels of both machines with llmserve inspect); ask again"
            )
        self._places[index] += len(token_ids)
        told += more
        if self._has_ended[index] or (num_again and not more and event.finish_reason is None):
            return None
        self._has_ended[index] = event.finish_reason is not None
        if num_again:
            event = event.with_tokens([event], num_again)
        return self._with_first_facts(event)

    def _with_first_facts(self, event: TokenEvent) -> TokenEvent:
        """Keep values that the reader got from the first worker, not those of the second."""
        if event.prompt is not None and self._has_prompt:
            event = replace(event, prompt=None)
        self._has_prompt |= event.prompt is not None
        if event.usage is None:
            return event
        first = self._first_usage.setdefault(event.sequence_index, event.usage)
        usage = replace(
            event.usage,
            cached_tokens=first.cached_tokens,
            arrival_ns=first.arrival_ns,
            first_scheduled_ns=first.first_scheduled_ns,
            first_token_ns=first.first_token_ns,
        )
        return replace(event, usage=usage)
