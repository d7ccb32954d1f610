"""How soon a process that has died is started again."""

from __future__ import annotations

SETTLED_AFTER_S = 10.0  # a process that has lived so long is started again at once
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


class BackOff:
    """Longer and longer pauses, while processes die young."""

    def __init__(self) -> None:
        self._pause_s = 0.0

    def pause_after(self, lived_s: float) -> float:
        """Seconds from the end of a process that has lived `lived_s` to the next one's start."""
        if lived_s > SETTLED_AFTER_S:
            self._pause_s = 0.0
        else:
            self._pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
        return self._pause_s
