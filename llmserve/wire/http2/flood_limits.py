"""Limits frames that cost the server time and the client nothing."""

from __future__ import annotations

import time

from llmserve.wire.http2.frames import ENHANCE_YOUR_CALM, ConnectionFailed

BURST = 4096
PER_SECOND = 1000


class FloodLimit:
    """The limit of one connection: `BURST` at once, `PER_SECOND` in the long run (RFC 9113, section 10.5)."""

    def __init__(self) -> None:
        self._left = float(BURST)
        self._counted_at = time.monotonic()

    def spend(self, what: str, *, cost: int = 1) -> None:
        self._left -= cost
        if self._left < 0:
            now = time.monotonic()
            self._left = min(BURST, self._left + PER_SECOND * (now - self._counted_at))
            self._counted_at = now
            if self._left < 0:
                raise ConnectionFailed(ENHANCE_YOUR_CALM, f"too many {what}")
