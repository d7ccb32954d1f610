"""Stop words, which end an answer, and bad words, which it must not contain. Both are token sequences.

They are indexed once per request, and cost a few tuple look-ups per token, however many words there are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

Word = tuple[int, ...]


class StopWords:
    """Finds complete and partial stop words at the end of an answer."""

    def __init__(self, words: Iterable[Word]) -> None:
        self._words = frozenset(words)
        self._lengths = sorted({len(word) for word in self._words}, reverse=True)
        self._beginnings = frozenset(word[:end] for word in self._words for end in range(1, len(word)))
        self.single_ids = tuple(sorted(word[0] for word in self._words if len(word) == 1))
        self.max_length = max(self._lengths, default=0)

    def num_matched(self, tail: Word) -> int:
        """Length of the longest stop word that `tail` ends with; 0 if there is none."""
        for length in self._lengths:
            if length <= len(tail) and tail[-length:] in self._words:
                return length
        return 0

    def num_begun(self, tail: Word) -> int:
        """Length of the longest end of `tail` that is the beginning of a stop word."""
        for length in range(min(len(tail), self.max_length - 1), 0, -1):
            if tail[-length:] in self._beginnings:
                return length
        return 0


class BadWords:
    """Finds the tokens that would complete a bad word."""

    def __init__(self, words: Iterable[Word]) -> None:
        last_ids: dict[int, dict[Word, set[int]]] = defaultdict(lambda: defaultdict(set))
        for word in words:
            last_ids[len(word) - 1][word[:-1]].add(word[-1])
        self._last_ids = {length: dict(by_beginning) for length, by_beginning in last_ids.items()}
        self.max_beginning = max(self._last_ids, default=0)  # last tokens that determine what is banned

    def banned_after(self, token_ids: Sequence[int]) -> set[int]:
        """Every token that would complete a bad word after `token_ids` (prompt and output)."""
        banned: set[int] = set()
        for length, by_beginning in self._last_ids.items():
            if length <= len(token_ids):
                banned |= by_beginning.get(tuple(token_ids[len(token_ids) - length :]), set())
        return banned
