"""Counts the values of a JSON text before any is created."""

from __future__ import annotations

import numpy as np

MAX_VALUES = 256 * 1024  # in a document: a list of as many empty objects takes a tenth of a second


def may_have_many(num_bytes: int) -> bool:
    return num_bytes > 2 * MAX_VALUES


def num_values(raw: bytes) -> int:
    """An upper bound: an empty list counts twice; text in strings does not count."""
    marks = np.frombuffer(raw.replace(rb"\\", b"").replace(b'\\"', b""), np.uint8)
    is_outside = ~np.logical_xor.accumulate(marks == ord('"'))
    counted = (marks == ord(",")) | (marks == ord("[")) | (marks == ord("{"))
    return int(np.count_nonzero(counted & is_outside)) + 1
