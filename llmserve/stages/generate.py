"""The generate step: tokens from an engine, with what is needed to turn each event into text on its own.

Stop words are matched twice: by the engine as id sequences, and here as strings in the decoded text, which finds them
however the model tokenised them. Ids whose text may turn into a stop string are held back. When one is found, the
engine's stream is closed; the last event carries the ids before the stop string and, where it begins inside
a token, the text of that token's first part (`tail_text`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from llmserve.core import FinishReason, GenerateRequest, TokenEvent, Usage
from llmserve.engine.base import Engine
from llmserve.errors import InvalidArgument
from llmserve.stages.detokenize import window_of
from llmserve.stages.stop_strings import find_stop, num_held
from llmserve.stages.text import REPLACEMENT
from llmserve.stages.tokenizer import Tokenizer

BLIND_WINDOW = 16  # ids of window when there is no tokenizer to choose it


@dataclass(frozen=True, slots=True)
class GeneratedEvent:
    """An engine's event, and its place in the text."""

    tokens: TokenEvent
    window_ids: tuple[int, ...]  # output ids before the new ones, enough to decode them; empty at the beginning
    tail_text: str = ""  # follows the text of the new ids; only in a last event


def generate(
    engine: Engine,
    request: GenerateRequest,
    *,
    tokenizer: Tokenizer | None = None,
    stop_strings: Sequence[str] = (),
) -> AsyncGenerator[GeneratedEvent, None]:
    """Validate now, enqueue on first pull, as `Engine.submit`. Stop strings need a tokenizer."""
    stops = tuple(dict.fromkeys(stop for stop in stop_strings if stop))
    if stops and tokenizer is None:
        raise InvalidArgument("stop strings need a tokenizer, and there is none beside the engine; set tokenizer_dir")
    return _watch(engine.submit(request), [_Sequence(request, tokenizer, stops) for _ in range(request.num_sequences)])


async def _watch(
    stream: AsyncGenerator[TokenEvent, None], sequences: Sequence[_Sequence]
) -> AsyncGenerator[GeneratedEvent, None]:
    arrival_ns = time.time_ns()
    async with aclosing(stream):
        async for event in stream:
            sequence = sequences[event.sequence_index]
            if sequence.finished:  # the others of this request go on
                continue
            if (out := sequence.push(event, arrival_ns)) is not None:
                yield out
            if sequence.finished and all(each.finished for each in sequences):
                return


class _Sequence:
    """One answer in the making: what was passed on, and what waits because of a possible stop string."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer | None, stops: tuple[str, ...]) -> None:
        self._prompt_tokens = len(request.prompt_ids)
        self._min_tokens = request.sampling.min_tokens
        self._tokenizer = tokenizer
        self._stops = stops
        self._passed: list[int] = []
        self._waiting: list[int] = []
        self._waiting_log_probs: list[float] = []
        self._first_token_ns = 0
        self.finished = False

    def push(self, event: TokenEvent, arrival_ns: int) -> GeneratedEvent | None:
        """What to pass on after `event`; None when all of it has to wait."""
        self._first_token_ns = self._first_token_ns or time.time_ns()
        self._waiting += event.token_ids
        self._waiting_log_probs += event.log_probs
        window = self._window()
        kept = self._text_before_stop(window, is_final=event.finish_reason is not None) if self._stops else None
        if kept is not None:
            return self._stop(event, window, kept, arrival_ns)
        self.finished = event.finish_reason is not None
        count = len(self._waiting) if self.finished or not self._stops else self._num_free(window)
        if not count and not self.finished:
            return None
        return GeneratedEvent(self._take(event, count), window)

    def _window(self) -> tuple[int, ...]:
        if self._tokenizer is None:
            return tuple(self._passed[-BLIND_WINDOW:])
        return tuple(window_of(self._tokenizer, self._passed))

    def _text_before_stop(self, window: Sequence[int], *, is_final: bool) -> str | None:
        """What is left of the waiting text when a stop string ends it; None when there is none in it."""
        text = self._text(window, self._waiting)
        start = self._num_exempt(window)
        cut = find_stop(text[start:] if is_final else text[start:].rstrip(REPLACEMENT), self._stops)
        return None if cut is None else text[: start + cut]

    def _num_free(self, window: Sequence[int]) -> int:
        """How many waiting ids can go: with complete characters, and clear of a possible stop string."""
        assert self._tokenizer is not None
        text = self._tokenizer.decode_stable([*window, *self._waiting])[len(self._tokenizer.decode(window)) :]
        limit = len(text) - num_held(text[self._num_exempt(window) :], self._stops)
        for count in range(len(self._waiting), 0, -1):
            ids = [*window, *self._waiting[:count]]
            is_complete = self._tokenizer.decode(ids) == self._tokenizer.decode_stable(ids)
            if is_complete and len(self._text(window, self._waiting[:count])) <= limit:
                return count
        return 0

    def _num_exempt(self, window: Sequence[int]) -> int:
        """Waiting characters of the first `min_tokens` ids: as in the engine, no stop word may reach into them."""
        assert self._tokenizer is not None
        count = max(0, self._min_tokens - len(self._passed))
        return len(self._tokenizer.decode_stable([*window, *self._waiting[:count]])) - len(
            self._tokenizer.decode(window)
        )

    def _text(self, window: Sequence[int], ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode([*window, *ids])[len(self._tokenizer.decode(window)) :]

    def _stop(self, event: TokenEvent, window: tuple[int, ...], kept: str, arrival_ns: int) -> GeneratedEvent:
        """The last event of a sequence that a stop string ends: `kept` is the text before it."""
        texts = [self._text(window, self._waiting[:count]) for count in range(len(self._waiting) + 1)]
        count = max(count for count, text in enumerate(texts) if kept.startswith(text))
        self.finished = True
        now = time.time_ns()
        tokens = self._take(event, count)
        usage = event.usage or Usage(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=0,  # not known before the engine's own last event, which is not waited for
            completion_tokens=0,
            arrival_ns=arrival_ns,
            first_scheduled_ns=arrival_ns,
            first_token_ns=self._first_token_ns,
            last_token_ns=now,
        )
        usage = replace(usage, completion_tokens=len(self._passed))
        tokens = replace(tokens, finish_reason=FinishReason.STOP_WORDS, usage=usage)
        return GeneratedEvent(tokens, window, kept[len(texts[count]) :])

    def _take(self, event: TokenEvent, count: int) -> TokenEvent:
        """`event`, with the first `count` waiting ids as its tokens."""
        ids, self._waiting = self._waiting[:count], self._waiting[count:]
        log_probs, self._waiting_log_probs = self._waiting_log_probs[:count], self._waiting_log_probs[count:]
        self._passed += ids
        return replace(
            event,
            token_ids=tuple(ids),
            log_probs=tuple(log_probs),
            cum_log_prob=event.cum_log_prob - sum(self._waiting_log_probs),
        )
