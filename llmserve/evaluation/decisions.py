"""A network's view of a given answer: the likelihood of each of its tokens, and the alternatives.

A decision is one position of a baseline's answer, given the baseline's text before it; the end token is one too. That
is far more sensitive than comparing two answers: every position counts, not only those where the best token changed,
and positions after a change are not lost.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmserve.core import TopTokens

NUM_TOP = 10  # likeliest tokens that a baseline stores for each decision
LEAST_REST = 1e-7  # probability; a smaller rest is the rounding of a sum in float32


@dataclass(frozen=True, slots=True)
class Decision:
    """One token of an answer, and the likeliest ones at its position; log-probs are natural logarithms."""

    token: int
    log_prob: float
    top: TopTokens

    @property
    def margin(self) -> float:
        """Nats between the two likeliest tokens; 0 if there is only one."""
        best = self.top.log_probs
        return best[0] - best[1] if len(best) > 1 else 0.0

    def log_probs(self) -> dict[int, float]:
        """Log-probs of all its tokens."""
        return dict(zip(self.top.ids, self.top.log_probs, strict=True)) | {self.token: self.log_prob}


def divergence(expected: Decision, actual: Decision) -> float:
    """Kullback-Leibler divergence of `actual` from `expected` in nats, over the tokens that both contain, with all
    others merged into one. Merging tokens never makes it larger, so it is at most that of the whole distributions."""
    one, other = expected.log_probs(), actual.log_probs()
    shared = [token for token in one if token in other]
    p, q = (np.array([side[token] for token in shared]) for side in (one, other))
    rest_p, rest_q = (max(1.0 - float(np.exp(told).sum()), 0.0) for told in (p, q))
    found = float((np.exp(p) * (p - q)).sum())
    if rest_p > LEAST_REST:
        found += rest_p * float(np.log(rest_p / max(rest_q, LEAST_REST)))
    return max(found, 0.0)


def pack(decisions: Sequence[Decision]) -> str:
    """Encode as text for a JSON file: tokens, log-probs and the likeliest of each, 4-byte numbers, deflated, in base64.

    All must have the same number of tokens.
    """
    columns = [
        np.array([[decision.token, *decision.top.ids] for decision in decisions], "<u4"),
        np.array([[decision.log_prob, *decision.top.log_probs] for decision in decisions], "<f4"),
    ]
    raw = b"".join(column.tobytes() for column in columns)
    return base64.b64encode(zlib.compress(raw, level=9)).decode()


def unpack(text: str, count: int) -> tuple[Decision, ...]:
    """The `count` decisions that `pack` wrote. Raises `ValueError` if the text has another number."""
    try:
        raw = zlib.decompress(base64.b64decode(text, validate=True))
    except (zlib.error, binascii.Error) as error:
        raise ValueError(f"decisions cannot be read: {error}") from error
    width, rest = divmod(len(raw), 8 * count) if count else (0, len(raw))
    if rest or (count and width < 2):
        raise ValueError(f"{len(raw)} bytes are not {count} decisions")
    half = len(raw) // 2
    ids = np.frombuffer(raw[:half], "<u4").reshape(count, width)
    log_probs = np.frombuffer(raw[half:], "<f4").reshape(count, width).astype(np.float64)
    return tuple(
        Decision(row[0], values[0], TopTokens(tuple(row[1:]), tuple(values[1:])))
        for row, values in zip(ids.tolist(), log_probs.tolist(), strict=True)
    )
