"""Rotary embedding, done where queries and keys are read."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turned(x, cos, sin, heads, columns, is_number, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr):
    """Heads of a row, the pairs (i, i + ROTARY_DIM / 2) of each turned; float32 [heads, columns]."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    begins = x + (heads * HEAD_DIM)[:, None]
    values = tl.load(begins + columns[None, :], mask=is_number, other=0.0).to(tl.float32)
    if ROTARY_DIM > 0:
        is_turned = columns < ROTARY_DIM
        is_first = columns < HALF
        partners = tl.where(is_first, columns + HALF, columns - HALF)
        others = tl.load(begins + partners[None, :], mask=is_number & is_turned[None, :], other=0.0).to(tl.float32)
        places = tl.where(is_first, columns, columns - HALF)
        cosines = tl.load(cos + places, mask=is_turned, other=1.0)
        sines = tl.load(sin + places, mask=is_turned, other=0.0)
        sines = tl.where(is_first, -sines, sines)
        values = values * cosines[None, :] + others * sines[None, :]
    return values
