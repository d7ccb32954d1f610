"""Converts ids to text as they arrive, without state: each event includes a window of the ids before it.

`delta(window, new) = text(window + new) - text(window)`, both decoded from the same place. So the special treatment of
a text's beginning (dropping a leading space) cancels out, and a character whose bytes are spread over several events
appears when it is complete. Concatenated deltas equal the decoding of all ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from llmserve.stages.text import REPLACEMENT
from llmserve.stages.tokenizer import Tokenizer

Decode: TypeAlias = Callable[[tuple[int, ...]], str]

MIN_WINDOW = 4


def window_of(tokenizer: Tokenizer, ids: Sequence[int]) -> Sequence[int]:
    """The shortest suffix of `ids` (of a few lengths) after which text decodes as after all of `ids`.

    It has a visible character that is final: special treatment of the beginning comes before it, and any incomplete
    character comes after it.
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

    `stable` is a tokenizer's `decode_stable`. So is `whole`, except in the final delta, where it is `decode`, which
    also returns text that was held back.
    """
    seen = stable(tuple(window)) if window else ""
    return whole((*window, *new))[len(seen) :]
