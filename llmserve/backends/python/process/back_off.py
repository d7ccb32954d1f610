"""The delay before a process that died is restarted."""

from __future__ import annotations

SETTLED_AFTER_S = 10.0  # a process that lived this long is restarted immediately
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


class BackOff:
    """Delays that grow while processes die soon after their start."""

    def __init__(self) -> None:
        self._pause_s = 0.0

    def pause_after(self, lived_s: float) -> float:
        """Seconds between the end of a process that lived `lived_s` and the next start."""
        if lived_s > SETTLED_AFTER_S:
            self._pause_s = 0.0
        else:
            self._pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
        return self._pause_s
