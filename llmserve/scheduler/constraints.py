"""What may be drawn at each place of a draft: what might be if the tokens before it had been drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from llmserve.core import Matcher


class DraftedGuide:
    """A guide's matcher at each place of a draft. A mask makes it from that of the place before, beside the step."""

    def __init__(self, matcher: Matcher, end_ids: Sequence[int], drafted: Sequence[int]) -> None:
        self._matchers = [matcher]
        self._end_ids = end_ids
        self._drafted = drafted

    def mask(self, place: int) -> Callable[[], bytes]:
        """To be called behind those of earlier places."""
        return partial(self._mask, place)

    def matcher(self, place: int) -> Matcher:
        """One that has seen the tokens before `place`, once its mask was made."""
        return self._matchers[place]

    def _mask(self, place: int) -> bytes:
        assert place in (0, len(self._matchers)), "masks are made in order"
        if place:
            matcher = self._matchers[-1].fork()
            matcher.advance(self._drafted[place - 1])
            self._matchers.append(matcher)
        return self._matchers[place].mask(self._end_ids)
