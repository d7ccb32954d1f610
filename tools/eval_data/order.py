"""A shuffled order that is the same on every machine and in every version of Python."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def in_keyed_order(texts: Iterable[str], key: str) -> list[str]:
    """Sorts by the SHA-256 of key and text."""
    return sorted(texts, key=lambda text: hashlib.sha256(f"{key}:{text}".encode()).digest())
