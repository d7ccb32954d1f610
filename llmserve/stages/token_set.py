"""A guide that is a list of token ids: an answer has no others, regardless of its text so far.

It ends by one of them, or at its limit.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import numpy as np

from llmserve.core import GuideState

KIND = "token_ids"


class TokenSet:
    """The guide, and also each answer's matcher, since previous tokens do not matter."""

    state = GuideState.OPEN

    def __init__(self, text: str, vocab_size: int) -> None:
        """`text`: a list in JSON. Raises `ValueError` for anything else."""
        ids = json.loads(text)
        if not isinstance(ids, list) or not ids or not all(type(each) is int for each in ids):
            raise ValueError("expected a JSON list of token ids")
        if wrong := [each for each in ids if not 0 <= each < vocab_size]:
            raise ValueError(f"the vocabulary has the ids 0 to {vocab_size - 1}, not {wrong[0]}")
        self.source = KIND, text
        self._ids = frozenset(ids)
        allowed = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        allowed[ids] = 1
        self._mask = np.packbits(allowed, bitorder="little").tobytes()

    def start(self) -> TokenSet:
        return self

    def fork(self) -> TokenSet:
        return self

    def mask(self, end_ids: Sequence[int]) -> bytes:
        return self._mask

    def advance(self, token: int) -> None:
        """Changes nothing."""

    def is_complete(self) -> bool:
        return False

    def likely(self) -> Sequence[int]:
        return tuple(self._ids) if len(self._ids) == 1 else ()

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        return sum(1 for _ in itertools.takewhile(self._ids.__contains__, token_ids))
