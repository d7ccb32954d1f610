"""The postprocess step: converts one event's ids to the text that they add. Any instance can process any event."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from llmserve.stages.detokenize import text_delta
from llmserve.stages.generate import GeneratedEvent
from llmserve.stages.tokenizer import Tokenizer, load_tokenizer

MAX_KNOWN_TEXTS = 8192  # one for each concurrent stream
MAX_KNOWN_IDS = 64  # length of one such text


class Postprocessor:
    """Stateless except for cached texts: a window with the ids after it is usually the next event's window."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._other: Postprocessor | None = None  # the other variant, created on first use
        self._known_text = lru_cache(MAX_KNOWN_TEXTS)(self._decode_stable)

    @classmethod
    def open(cls, path: Path, *, skip_special_tokens: bool = True) -> Postprocessor:
        return cls(load_tokenizer(path), skip_special_tokens)

    def skipping(self, skips: bool) -> Postprocessor:
        """A variant of this one that leaves special tokens out, or spells them."""
        if skips == self._skips:
            return self
        if self._other is None:
            self._other = Postprocessor(self.tokenizer, skips)
        return self._other

    def text(self, ids: Sequence[int], window: Sequence[int] = (), *, final: bool = True, tail: str = "") -> str:
        """`window`: the preceding ids, as chosen by the generate step. A whole answer is one final event."""
        return text_delta(window, ids, stable=self._stable, whole=self._decode if final else self._stable) + tail

    def event_text(self, event: GeneratedEvent) -> str:
        is_final = event.tokens.finish_reason is not None
        return self.text(event.tokens.token_ids, event.window_ids, final=is_final, tail=event.tail_text)

    def _decode(self, ids: tuple[int, ...]) -> str:
        return self.tokenizer.decode(ids, self._skips)

    def _decode_stable(self, ids: tuple[int, ...]) -> str:
        return self.tokenizer.decode_stable(ids, self._skips)

    def _stable(self, ids: tuple[int, ...]) -> str:
        return self._known_text(ids) if len(ids) <= MAX_KNOWN_IDS else self._decode_stable(ids)
