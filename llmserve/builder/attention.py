"""Attention in numpy, for the reference, with a cache of floats or of integers.

Shapes in names: T tokens, N query heads, G key/value heads, D head size.
"""

# ruff: noqa: N806 - names carry shapes

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.quantization import Matrix, mix_heads, mixed_blocks, round_in_groups, round_to_steps
from llmserve.models.graph import Op
from llmserve.models.number_formats import NumberFormat

SHARE_STEPS = 16383  # of a query's shares of the values in an integer cache
SHARE_CHUNK = 256  # positions whose shares have a common scale


def attention(op: Op, q: Matrix, k: Matrix, v: Matrix, sinks: Matrix | None = None) -> Matrix:
    v_GTD = _heads(v, int(op.number("num_kv_heads")))
    return _attend(op, q, k, sinks, lambda weights, kv_head: weights @ v_GTD[kv_head])


def attention_in_integers(
    op: Op, cache: NumberFormat, q: Matrix, k: Matrix, v: Matrix, sinks: Matrix | None = None
) -> Matrix:
    """Attention with an integer cache: queries and keys have a scale for each group of dimensions of a head, values one
    per head. A query's shares of the values (its weights times their scales) are rounded too, with one scale per
    SHARE_CHUNK positions."""
    head_dim, most = int(op.number("head_dim")), np.float32(cache.most)
    v_GTD = _heads(v, int(op.number("num_kv_heads")))
    peak_GT1 = np.abs(v_GTD).max(axis=2, keepdims=True)
    integers_GTD = np.rint(v_GTD * (most / np.where(peak_GT1 > 0, peak_GT1, np.float32(np.inf))))
    scale_GT = peak_GT1[:, :, 0] / most

    def weigh(weights: Matrix, kv_head: int) -> Matrix:
        shares = weights * scale_GT[kv_head]
        for begin in range(0, len(v), SHARE_CHUNK):
            chunk = slice(begin, begin + SHARE_CHUNK)
            shares[:, chunk] = round_to_steps(shares[:, chunk], SHARE_STEPS)
        taken: Matrix = shares @ integers_GTD[kv_head]
        return taken

    heads = [x.reshape(-1, head_dim) for x in (q, k)]
    if cache.mixes_heads:
        blocks = mixed_blocks(head_dim)
        heads = [mix_heads(x) for x in heads]
        heads[0] /= np.repeat(np.array(blocks, np.float32), blocks)
    q, k = (round_in_groups(x, cache).reshape(len(q), -1) for x in heads)
    return _attend(op, q, k, sinks, weigh)


def _attend(op: Op, q: Matrix, k: Matrix, sinks: Matrix | None, weigh: Callable[[Matrix, int], Matrix]) -> Matrix:
    """`weigh` multiplies the weights of one head [T, T] by the values of a KV head."""
    num_heads, num_kv_heads = int(op.number("num_heads")), int(op.number("num_kv_heads"))
    q_NTD, k_GTD = _heads(q, num_heads), _heads(k, num_kv_heads)
    mask, distance = _causal(len(q), window=int(op.number("window")), chunked=bool(op.number("chunked")))
    if op.number("bidirectional"):
        mask[:] = True
    slopes = op.attrs["alibi_slopes"]
    y_NTD = np.empty_like(q_NTD)
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        scores = soft_capped(q_NTD[head] @ k_GTD[kv_head].T * np.float32(op.number("scale")), op.number("soft_cap"))
        if isinstance(slopes, tuple) and slopes:
            scores = scores + np.float32(slopes[head]) * distance
        scores = np.where(mask, scores, -np.inf)
        if sinks is not None:  # an additional column, whose weight belongs to no key
            scores = np.concatenate((scores, np.full((len(scores), 1), sinks[head], np.float32)), axis=1)
        y_NTD[head] = weigh(softmax(scores)[:, : len(scores)], kv_head)
    return y_NTD.transpose(1, 0, 2).reshape(len(q), -1)


def soft_capped(x: Matrix, cap: float) -> Matrix:
    if not cap:
        return x
    capped: Matrix = np.tanh(x / np.float32(cap)) * np.float32(cap)
    return capped


def _heads(x: Matrix, count: int) -> Matrix:
    """Reshape [T, count * D] to [count, T, D]."""
    return x.reshape(len(x), count, -1).transpose(1, 0, 2)


def _causal(length: int, *, window: int, chunked: bool) -> tuple[NDArray[np.bool_], Matrix]:
    """Returns which keys j a query i sees, and j - i, both [T, T]."""
    distance = np.arange(length)[None, :] - np.arange(length)[:, None]
    mask = distance <= 0
    if chunked:
        chunks = np.arange(length) // window
        mask &= chunks[None, :] == chunks[:, None]
    elif window:
        mask &= distance > -window
    return mask, distance.astype(np.float32)


def softmax(scores: Matrix) -> Matrix:
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    normalized: Matrix = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return normalized
