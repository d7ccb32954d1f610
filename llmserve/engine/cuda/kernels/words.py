"""Sums of one run of a weight's inputs for few rows, without matrix instructions: each thread has an output, and
multiplies four of its integers at a time, a word. `integers.py` of the builder says how weights lie.
"""

from __future__ import annotations

import triton
import triton.language as tl

PANEL: tl.constexpr = tl.constexpr(32)  # `layout.PANEL_OUTPUTS`
PIECE_WORDS: tl.constexpr = tl.constexpr(4)  # of `layout.PIECE_BYTES`
UNROLLED: tl.constexpr = tl.constexpr(8)  # rows times groups whose loads are under way


@triton.jit
def _dot4(a, b, sums):
    """sums + the products of four pairs of int8, which each word of `a` and `b` has."""
    return tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, sums], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _group(first, second, x_at, TILE_COLUMNS: tl.constexpr):
    """The products of a group, summed, of one row: two pieces of each output with two of the row."""
    products = _dot4(first, tl.load(x_at), tl.zeros((TILE_COLUMNS, PIECE_WORDS), tl.int32))
    return tl.sum(_dot4(second, tl.load(x_at + PIECE_WORDS), products), axis=1).to(tl.float32)


@triton.jit
def _places(
    x, w, row, columns, first,
    X_STRIDE: tl.constexpr, NUM_COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    X_WORDS: tl.constexpr,
):  # fmt: skip
    """Where the words of rows and weight are from block `first` on, for each output, and which blocks of scales.

    BLOCKS: of BLOCK_WORDS in a panel of the weight, and of X_WORDS in a row.
    """
    words = tl.arange(0, PIECE_WORDS)
    # what is beyond the last output reads the last panel again
    panels = tl.minimum(columns // PANEL, (NUM_COLUMNS + PANEL - 1) // PANEL - 1)
    blocks = panels.to(tl.int64) * BLOCKS + first
    w_at = w + (blocks * BLOCK_WORDS + columns % PANEL * PIECE_WORDS)[:, None] + words[None, :]
    # the same words for all outputs: each thread loads what it multiplies
    x_at = x + row * (X_STRIDE // 4) + first * X_WORDS + (columns * 0)[:, None] + words[None, :]
    return x_at, w_at, blocks


@triton.jit
def _nothing(TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    sums = ()
    for r in tl.static_range(TILE_ROWS):
        sums = sums + (tl.zeros((TILE_COLUMNS,), tl.float32),)
    return sums


@triton.jit
def words_of_bytes(
    x, x_scales, w, w_scales, row, columns, segment,
    X_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr, NUM_COLUMNS: tl.constexpr, NUM_INPUTS: tl.constexpr,
    SEGMENTS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """For each row its sums, [TILE_COLUMNS]. As `segments.segment_of` of "int8" sums, in the same order."""
    GROUPS: tl.constexpr = (NUM_INPUTS + 2 * TILE_INPUTS - 1) // (2 * TILE_INPUTS) * 2
    STEPS: tl.constexpr = (GROUPS // 2 + SEGMENTS - 1) // SEGMENTS * 2  # whole pairs
    WORDS: tl.constexpr = PANEL * TILE_INPUTS // 4
    first = segment * STEPS
    count = STEPS
    if GROUPS // 2 % SEGMENTS != 0:
        count = tl.minimum(STEPS, GROUPS - first)
    x_at, w_at, blocks = _places(x, w, row, columns, first, X_STRIDE, NUM_COLUMNS, GROUPS, WORDS, TILE_INPUTS // 4)
    x_scales_at = x_scales + row * SCALES_STRIDE + first
    w_scales_at = w_scales + blocks * PANEL + columns % PANEL
    sums = _nothing(TILE_ROWS, TILE_COLUMNS)
    for step in tl.range(count, loop_unroll_factor=UNROLLED // TILE_ROWS):
        low, high = tl.load(w_at), tl.load(w_at + WORDS // 2)
        steps = tl.load(w_scales_at).to(tl.float32)
        added = ()
        for r in tl.static_range(TILE_ROWS):
            products = _group(low, high, x_at + r * (X_STRIDE // 4), TILE_COLUMNS)
            added = added + (tl.fma(products, tl.load(x_scales_at + r * SCALES_STRIDE) * steps, sums[r]),)
        sums = added
        w_at += WORDS
        w_scales_at += PANEL
        x_at += TILE_INPUTS // 4
        x_scales_at += 1
    return sums


@triton.jit
def words_of_nibbles(
    x, x_scales, w, w_scales, row, columns, segment,
    X_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr, NUM_COLUMNS: tl.constexpr, NUM_INPUTS: tl.constexpr,
    SEGMENTS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """As `words_of_bytes`, over pairs of groups: the second has the upper halves of the bytes."""
    PAIRS: tl.constexpr = (NUM_INPUTS + 2 * TILE_INPUTS - 1) // (2 * TILE_INPUTS)
    STEPS: tl.constexpr = (PAIRS + SEGMENTS - 1) // SEGMENTS
    WORDS: tl.constexpr = PANEL * TILE_INPUTS // 4
    first = segment * STEPS
    count = STEPS
    if PAIRS % SEGMENTS != 0:
        count = tl.minimum(STEPS, PAIRS - first)
    x_at, w_at, blocks = _places(x, w, row, columns, first, X_STRIDE, NUM_COLUMNS, PAIRS, WORDS, TILE_INPUTS // 2)
    x_scales_at = x_scales + row * SCALES_STRIDE + 2 * first
    w_scales_at = w_scales + blocks * (4 * PANEL) + columns % PANEL
    sums = _nothing(TILE_ROWS, TILE_COLUMNS)
    for step in tl.range(count, loop_unroll_factor=(UNROLLED // TILE_ROWS + 1) // 2):
        low, high = tl.load(w_at), tl.load(w_at + WORDS // 2)
        for half in tl.static_range(2):
            codes = tl.load(w_scales_at + half * (2 * PANEL)).to(tl.float32)
            zeros = tl.load(w_scales_at + half * (2 * PANEL) + PANEL).to(tl.float32) * -0.0625
            first_words, second_words = (low >> (4 * half)) & 0x0F0F0F0F, (high >> (4 * half)) & 0x0F0F0F0F
            added = ()
            for r in tl.static_range(TILE_ROWS):
                at = x_at + r * (X_STRIDE // 4) + half * (TILE_INPUTS // 4)
                scales = x_scales_at + r * SCALES_STRIDE + half
                scaled = _group(first_words, second_words, at, TILE_COLUMNS) * tl.load(scales)
                scaled = tl.fma(zeros, tl.load(scales + 2 * PAIRS), scaled)
                added = added + (tl.fma(scaled, codes * codes, sums[r]),)
            sums = added
        w_at += WORDS
        w_scales_at += 4 * PANEL
        x_at += TILE_INPUTS // 2
        x_scales_at += 2
    return sums
