"""The postprocess step: the ids of one event to the text that they add. Stateless, so any instance serves any event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmserve.stages.detokenize import text_delta
from llmserve.stages.generate import GeneratedEvent
from llmserve.stages.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class Postprocessor:
    tokenizer: Tokenizer
    skip_special_tokens: bool = True

    @classmethod
    def open(cls, path: Path, *, skip_special_tokens: bool = True) -> Postprocessor:
        return cls(load_tokenizer(path), skip_special_tokens)

    def text(self, ids: Sequence[int], window: Sequence[int] = (), *, final: bool = True, tail: str = "") -> str:
        """`window`: the ids before, as the generate step chose them. A whole answer is one final event."""
        skip = self.skip_special_tokens
        return text_delta(self.tokenizer, window, ids, final=final, skip_special_tokens=skip) + tail

    def event_text(self, event: GeneratedEvent) -> str:
        is_final = event.tokens.finish_reason is not None
        return self.text(event.tokens.token_ids, event.window_ids, final=is_final, tail=event.tail_text)
