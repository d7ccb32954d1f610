"""Finds training pairs that are too close to an evaluation pair."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from .corpus import Pair

DOCUMENT_NGRAM = 8
SUMMARY_NGRAM = 6
MAX_SUMMARY_JACCARD = 0.75


class Decontaminator:
    """Finds pairs that share a document 8-gram, a summary 6-gram or most summary words with an evaluation pair."""

    def __init__(self, evaluation_pairs: Iterable[Pair]) -> None:
        self._document_ngrams: set[tuple[str, ...]] = set()
        self._summary_ngrams: set[tuple[str, ...]] = set()
        self._summaries: list[frozenset[str]] = []
        self._summaries_with: dict[str, set[int]] = defaultdict(set)
        for pair in evaluation_pairs:
            self._document_ngrams |= _ngrams(_words(pair.document), DOCUMENT_NGRAM)
            self._summary_ngrams |= _ngrams(_words(pair.summary), SUMMARY_NGRAM)
            self._add_summary(frozenset(_words(pair.summary)))

    def is_near(self, pair: Pair) -> bool:
        summary = _words(pair.summary)
        return (
            not self._summary_ngrams.isdisjoint(_ngrams(summary, SUMMARY_NGRAM))
            or not self._document_ngrams.isdisjoint(_ngrams(_words(pair.document), DOCUMENT_NGRAM))
            or self._has_similar_summary(frozenset(summary))
        )

    def _add_summary(self, words: frozenset[str]) -> None:
        for word in words:
            self._summaries_with[word].add(len(self._summaries))
        self._summaries.append(words)

    def _has_similar_summary(self, words: frozenset[str]) -> bool:
        candidates = set().union(*(self._summaries_with.get(word, set()) for word in words))
        return any(
            len(words & self._summaries[i]) >= MAX_SUMMARY_JACCARD * len(words | self._summaries[i]) for i in candidates
        )


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _ngrams(words: list[str], size: int) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}
