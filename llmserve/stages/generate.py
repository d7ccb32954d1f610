"""The generate step: tokens from an engine, with the data for converting each event to text independently.

Stop words are matched twice: by the engine as id sequences, and here as strings in the decoded text, which finds them
however the model tokenized them. Ids whose text may become a stop string are held back. When one is found, the engine's
stream is closed. The last event has the ids before the stop string and, if that begins inside a token, the text of the
token's first part (`tail_text`).
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from llmserve.core import FinishReason, GenerateRequest, PromptScores, TokenEvent, Usage
from llmserve.engine.base import Engine
from llmserve.errors import InvalidArgument
from llmserve.stages.detokenize import window_of
from llmserve.stages.stop_strings import find_stop, num_held
from llmserve.stages.tokenizer import Tokenizer

BLIND_WINDOW = 16  # ids of the window without a tokenizer to choose it
MAX_WINDOW = 16  # ids of the window after which a shorter one is searched
MAX_CHARACTER_IDS = 4  # bytes of the longest UTF-8 character


@dataclass(frozen=True, slots=True)
class GeneratedEvent:
    """An engine's event, and its context in the text."""

    tokens: TokenEvent
    window_ids: tuple[int, ...]  # output ids before the new ones, enough to decode them; empty at the beginning
    tail_text: str = ""  # text after the new ids; only in a last event
    stop_string: str = ""  # the stop word that ended the answer; only in a last event


def generate(
    engine: Engine,
    request: GenerateRequest,
    *,
    tokenizer: Tokenizer | None = None,
    stop_strings: Sequence[str] = (),
) -> AsyncGenerator[GeneratedEvent, None]:
    """Validates at once and enqueues at the first pull, like `Engine.submit`. Stop strings require a tokenizer.

    The engine can only cancel whole requests: if a stop string ends one of several sequences, the engine continues it
    to its end id, stop ids or `max_tokens`, unless the others end first.
    """
    stops = tuple(dict.fromkeys(stop for stop in stop_strings if stop))
    if stops and tokenizer is None:
        raise InvalidArgument("stop strings require a tokenizer, but the engine directory has none; set tokenizer_dir")
    if stops and tokenizer is not None and request.num_answers == 1:
        # found in the text, which shows which one it was; ids would only end several answers earlier
        spelled = [ids for ids in request.stop_ids if any(stop in tokenizer.decode(ids) for stop in stops)]
        request = replace(request, stop_ids=tuple(ids for ids in request.stop_ids if ids not in spelled))
    return _watch(engine.submit(request), [_Answer(request, tokenizer, stops) for _ in range(request.num_answers)])


async def _watch(
    stream: AsyncGenerator[TokenEvent, None], sequences: Sequence[_Answer]
) -> AsyncGenerator[GeneratedEvent, None]:
    async with aclosing(stream):
        async for event in stream:
            sequence = sequences[event.sequence_index]
            if sequence.finished:  # the other sequences of this request continue
                continue
            if (out := sequence.push(event)) is not None:
                yield out
            if sequence.finished and all(each.finished for each in sequences):
                return


class _Answer:
    """One answer in progress: what was passed on, and what waits because of a possible stop string."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer | None, stops: tuple[str, ...]) -> None:
        self._min_tokens = request.sampling.min_tokens
        self._tokenizer = tokenizer
        self._stops = stops
        self._passed: list[int] = []
        self._window_start = 0  # in `_passed`
        self._waiting: list[int] = []
        self._events: list[TokenEvent] = []  # for the waiting ids
        self._prompt: PromptScores | None = None  # until it is passed on
        self._usage: Usage | None = None  # the engine's latest usage
        self.finished = False

    def push(self, event: TokenEvent) -> GeneratedEvent | None:
        """What to pass on after `event`; None if all of it must wait."""
        self._usage = event.usage or self._usage
        if not self._stops:  # never waits
            self.finished = event.finish_reason is not None
            window = self._window()
            self._passed += event.token_ids
            return GeneratedEvent(event if event.usage is None or self.finished else replace(event, usage=None), window)
        self._waiting += event.token_ids
        self._events.append(event)
        self._prompt = event.prompt or self._prompt
        self.finished = event.finish_reason is not None
        window = self._window()
        count = len(self._waiting)
        text, num_exempt = self._waiting_text(window), self._num_exempt(window)
        cut = find_stop(text[num_exempt:], self._stops)
        if cut is not None:
            met = min((stop for stop in self._stops if text.startswith(stop, num_exempt + cut)), key=len)
            return replace(self._stop(event, window, text[: num_exempt + cut]), stop_string=met)
        if not self.finished:
            count = self._num_within(window, text[: len(text) - num_held(text[num_exempt:], self._stops)])
        if not count and not self.finished:
            return None
        return GeneratedEvent(self._take(event, count), window)

    def _window(self) -> tuple[int, ...]:
        """It keeps its start for some events, so that the text of one event's window and ids is the text of the next
        one's window: see `Postprocessor`."""
        if self._tokenizer is None:
            return tuple(self._passed[-BLIND_WINDOW:])
        if len(self._passed) - self._window_start > MAX_WINDOW:
            self._window_start = len(self._passed) - len(window_of(self._tokenizer, self._passed))
        return tuple(self._passed[self._window_start :])

    def _waiting_text(self, window: Sequence[int]) -> str:
        """The text of the waiting ids; while more may come, only the part that is certain."""
        assert self._tokenizer is not None
        decode = self._tokenizer.decode if self.finished else self._tokenizer.decode_stable
        return decode([*window, *self._waiting])[len(self._tokenizer.decode(window)) :]

    def _num_exempt(self, window: Sequence[int]) -> int:
        """Waiting characters of the first `min_tokens` ids: as in the engine, a stop word may not include them."""
        assert self._tokenizer is not None
        count = self._min_tokens - len(self._passed)
        if count <= 0:
            return 0
        ids = [*window, *self._waiting[:count]]
        return max(0, len(self._tokenizer.decode_stable(ids)) - len(self._tokenizer.decode(window)))

    def _num_within(self, window: Sequence[int], text: str) -> int:
        """How many waiting ids have no text beyond `text`, which is a certain beginning of the waiting text.

        Ids that end inside a character do not decode to a beginning of `text`, which has the whole character. So from
        where the lengths agree, the search goes back by at most one character. At worst it finds too few.
        """
        assert self._tokenizer is not None
        tokenizer, start = self._tokenizer, len(self._tokenizer.decode(window))

        def text_of(count: int) -> str:
            return tokenizer.decode([*window, *self._waiting[:count]])[start:]

        if text.startswith(text_of(len(self._waiting))):
            return len(self._waiting)
        if not text:
            return 0
        longest = bisect_right(range(len(self._waiting)), len(text), key=lambda count: len(text_of(count))) - 1
        nearby = range(longest, max(0, longest - MAX_CHARACTER_IDS), -1)
        return next((count for count in nearby if text.startswith(text_of(count))), 0)

    def _stop(self, event: TokenEvent, window: tuple[int, ...], kept: str) -> GeneratedEvent:
        """The last event of a sequence that a stop string ends; `kept` is the text before it."""
        assert self._tokenizer is not None
        self.finished = True
        count = self._num_within(window, kept)
        shown = self._tokenizer.decode([*window, *self._waiting[:count]])[len(self._tokenizer.decode(window)) :]
        tokens = replace(self._take(event, count), finish_reason=FinishReason.STOP_WORDS)
        if self._usage is not None:
            last_ns = event.usage.last_token_ns if event.usage else time.time_ns()
            usage = replace(self._usage, completion_tokens=len(self._passed), last_token_ns=last_ns)
            tokens = replace(tokens, usage=usage)
        return GeneratedEvent(tokens, window, kept[len(shown) :])

    def _take(self, event: TokenEvent, count: int) -> TokenEvent:
        """`event`, with the first `count` waiting ids as its tokens."""
        taken, kept = event.with_tokens(self._events, 0, count), event.with_tokens(self._events, count)
        prompt, self._prompt = self._prompt, None
        self._passed += taken.token_ids
        self._waiting, self._events = list(kept.token_ids), [kept]
        return replace(
            taken,
            cum_log_prob=event.cum_log_prob - sum(kept.log_probs),
            usage=event.usage if event.finish_reason is not None else None,
            prompt=prompt,
        )
