"""Softmax over positions that are met tile by tile: what is known so far is relative to the largest score so far."""

from __future__ import annotations

import triton
import triton.language as tl

from llmserve.engine.cuda.kernels.activations import soft_capped


@triton.jit
def weights_of(
    scores, peak, positions, query_positions, slopes, is_there,
    SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr, HAS_ALIBI: tl.constexpr,
):  # fmt: skip
    """Weights of a tile of positions relative to the new peak, that peak, and what is left of weights before it."""
    if SOFT_CAP != 0.0:
        scores = soft_capped(scores, SOFT_CAP)
    distance = positions[None, :] - query_positions[:, None]
    if HAS_ALIBI:
        scores += slopes[:, None] * distance.to(tl.float32)
    is_seen = (distance <= 0) & is_there[None, :]
    if WINDOW > 0:
        is_seen = is_seen & (distance > -WINDOW)
    scores = tl.where(is_seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    return tl.exp(scores - base[:, None]), new_peak, tl.exp(peak - base)


@triton.jit
def merged(peak, total, taken, next_peak, next_total, next_taken):
    """Two runs as one."""
    both = tl.maximum(peak, next_peak)
    base = tl.where(both == float("-inf"), 0.0, both)
    first, second = tl.exp(peak - base), tl.exp(next_peak - base)
    return both, total * first + next_total * second, taken * first[:, None] + next_taken * second[:, None]
