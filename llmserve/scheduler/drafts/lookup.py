"""Prompt lookup: drafts what followed earlier occurrences of the newest tokens, in the own text or in earlier answers.

The occurrence with the longest match is used; several of equal length vote on each token. The longer the match, the
likelier the next token. Acceptance is counted by match length, separately for each source.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from llmserve.scheduler.drafts.acceptance import RECOVERY, Acceptance
from llmserve.scheduler.drafts.drafter import MAX_DRAFTED, Draftable
from llmserve.scheduler.drafts.own_text import MAX_MATCHED, Find, Found

LEVELS = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # match lengths, in tokens, at which a new count of acceptance begins
PRIOR_WEIGHT = 10.0  # tokens
PRIOR_REJECTED = 3.0  # rejected tokens, for as many accepted ones as the match is long


class LookupDrafter:
    """Drafts for one sequence. Of sources with equally long matches, the first is used."""

    def __init__(self, *sources: Find, least_matched: int = 1) -> None:
        """`least_matched`: tokens; shorter matches are not used."""
        self._sources = sources
        self._nothing = Found(least_matched - 1, ())
        self._acceptances = [_priors() for _ in sources]
        self._behind: list[Acceptance] = []  # the count that each proposed token belongs to

    def propose(self, sequence: Draftable, threshold: float) -> Sequence[int]:
        found, acceptances = self._nothing, self._acceptances[0]
        for find, of_source in zip(self._sources, self._acceptances, strict=True):
            if (other := find(sequence.token_ids)).num_matched > found.num_matched:
                found, acceptances = other, of_source
        self._behind = []
        drafted: list[int] = []
        followed, probability = found.followed, 1.0
        while followed and (place := len(drafted)) < MAX_DRAFTED:
            num_same = min(MAX_MATCHED, found.num_matched + place)
            token = followed[0][place]
            if len(followed) > 1:
                num_voting, (token, followed) = len(followed), _elected(followed, place)
                num_same = 2 * num_same if len(followed) == num_voting else num_same // 2
            acceptance = acceptances[num_same]
            probability *= acceptance.probability
            if probability <= threshold:
                if not drafted:
                    acceptance.num_rejected *= RECOVERY
                break
            drafted.append(token)
            self._behind.append(acceptance)
            followed = [tokens for tokens in followed if len(tokens) > place + 1]
        return drafted

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """See `Drafter`. Tokens after the first wrong one are not counted."""
        for place, acceptance in enumerate(self._behind[: min(num_drafted, num_accepted + 1)]):
            acceptance.learn(1, int(place < num_accepted))


def _elected(followed: Sequence[Sequence[int]], place: int) -> tuple[int, Sequence[Sequence[int]]]:
    """The most frequent token at this place (of equals, the newest), and the continuations that contain it."""
    token = followed[0][place]
    agreeing = [tokens for tokens in followed if tokens[place] == token]
    if 2 * len(agreeing) < len(followed):
        [(token, _)] = Counter(tokens[place] for tokens in followed).most_common(1)
        agreeing = [tokens for tokens in followed if tokens[place] == token]
    return token, agreeing


def _priors() -> list[Acceptance]:
    """The prior for each match length, where votes can double the length; one object per level."""
    rejected = [PRIOR_WEIGHT * PRIOR_REJECTED / (level + PRIOR_REJECTED) for level in LEVELS]
    of_levels = [Acceptance(num_rejected=count, num_accepted=PRIOR_WEIGHT - count) for count in rejected]
    return [of_levels[max(0, bisect_right(LEVELS, count) - 1)] for count in range(2 * MAX_MATCHED + 1)]
