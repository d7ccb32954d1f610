"""Ids to text as they arrive, without state: each event brings a window of the ids before it.

`delta(window, new) = text(window + new) - text(window)`, both decoded from the same place, so that what a decoder does
only at the beginning of a text (dropping a leading space) cancels out, and a character whose bytes are spread over
several events appears once it is complete. Concatenated deltas equal the decoding of all ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from llmserve.stages.text import REPLACEMENT
from llmserve.stages.tokenizer import Tokenizer

Decode: TypeAlias = Callable[[tuple[int, ...]], str]

MIN_WINDOW = 4


def window_of(tokenizer: Tokenizer, ids: Sequence[int]) -> Sequence[int]:
    """The shortest suffix of `ids` (of some lengths) that decodes like the whole from its end on.

    That is one with a visible character that is there to stay: whatever the decoder does at the beginning happens
    before it, and any character in the making lies after it.
    """
    length = MIN_WINDOW
    while length < len(ids):
        tail = ids[-length:]
        if any(not character.isspace() and character != REPLACEMENT for character in tokenizer.decode_stable(tail)):
            return tail
        length *= 2
    return ids


def text_delta(window: Sequence[int], new: Sequence[int], *, stable: Decode, whole: Decode) -> str:
    """The text that `new` adds after `window`.

    `stable` is a tokenizer's `decode_stable`. So is `whole`, or in the final delta `decode`: that also brings what had
    been held back.
    """
    seen = stable(tuple(window)) if window else ""
    return whole((*window, *new))[len(seen) :]
