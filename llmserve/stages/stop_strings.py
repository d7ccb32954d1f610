"""Stop strings in growing text: where one ends the answer, and what might become one."""

from __future__ import annotations

from collections.abc import Sequence


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where to cut `text`: the start of the stop string that is complete first; None if there is none.

    It is the one that is complete first, not the one that begins first, so the cut does not depend on the split.
    """
    found = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def num_held(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a stop string."""
    longest = min(len(text), max((len(stop) for stop in stops), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in stops)), 0)
