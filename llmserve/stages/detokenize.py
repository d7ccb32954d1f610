"""Ids to text as they arrive, without state: each event brings a window of the ids before it.

`delta(window, new) = text(window + new) - text(window)`, both decoded from the same place, so that what a decoder does
only at the beginning of a text (dropping a leading space) cancels out, and a character whose bytes are spread over
several events appears once it is complete. Concatenated deltas equal the decoding of all ids.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.stages.text import REPLACEMENT
from llmserve.stages.tokenizer import Tokenizer

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


def text_delta(
    tokenizer: Tokenizer,
    window: Sequence[int],
    new: Sequence[int],
    *,
    final: bool,
    skip_special_tokens: bool = True,
) -> str:
    """The text that `new` adds after `window`. The final delta also brings what had been held back."""
    decode = tokenizer.decode if final else tokenizer.decode_stable
    seen = tokenizer.decode_stable(window, skip_special_tokens) if window else ""
    return decode([*window, *new], skip_special_tokens)[len(seen) :]
