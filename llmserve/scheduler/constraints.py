"""Constrained decoding of drafts: the allowed tokens at each position, if the drafted tokens before it are accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from llmserve.core import Matcher


class DraftedGuide:
    """A guide's matcher at each position of a draft. Each is forked from the previous one while the step runs."""

    def __init__(self, matcher: Matcher, end_ids: Sequence[int], drafted: Sequence[int]) -> None:
        self._matchers = [matcher]
        self._end_ids = end_ids
        self._drafted = drafted

    def mask(self, place: int) -> Callable[[], bytes]:
        """Makes the mask for `place`. Must be called in order of places."""
        return partial(self._mask, place)

    def matcher(self, place: int) -> Matcher:
        """The matcher that has seen the tokens before `place`. Its mask must have been made."""
        return self._matchers[place]

    def _mask(self, place: int) -> bytes:
        assert place in (0, len(self._matchers)), "masks are made in order"
        if place:
            matcher = self._matchers[-1].fork()
            matcher.advance(self._drafted[place - 1])
            self._matchers.append(matcher)
        return self._matchers[place].mask(self._end_ids)
