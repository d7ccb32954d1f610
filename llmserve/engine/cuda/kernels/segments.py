"""Sums of one run of a weight's inputs, by matrix instructions: of floats, bytes and halves of bytes.

`linear.py` says what FORMAT is, and how a tile of sums lies.
"""

from __future__ import annotations

import triton
import triton.language as tl

PANEL: tl.constexpr = tl.constexpr(32)  # `layout.PANEL_OUTPUTS`
PIECE: tl.constexpr = tl.constexpr(16)  # `layout.PIECE_BYTES`


@triton.jit
def _loaded(at, mask, IS_WHOLE: tl.constexpr):
    """Numbers outside of the mask are zeros; IS_WHOLE: there are none."""
    if IS_WHOLE:
        return tl.load(at)
    else:
        return tl.load(at, mask=mask, other=0)


@triton.jit
def _pair(at, mask, IS_WHOLE: tl.constexpr):
    """Two adjacent float32 with one load. `at`: the address of the first, a multiple of eight."""
    both = _loaded(at.to(tl.pointer_type(tl.int64), bitcast=True), mask, IS_WHOLE)
    return both.to(tl.int32).to(tl.float32, bitcast=True), (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _segment_of_floats(
    x, w, row, outputs, is_column, segment,
    X_STRIDE: tl.constexpr, IS_WHOLE: tl.constexpr, NUM_INPUTS: tl.constexpr, SEGMENTS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """`w`: row-major. IS_WHOLE: no output of the tile is too many."""
    STEPS: tl.constexpr = (NUM_INPUTS + TILE_INPUTS * SEGMENTS - 1) // (TILE_INPUTS * SEGMENTS)
    HAS_ALL: tl.constexpr = NUM_INPUTS % (TILE_INPUTS * SEGMENTS) == 0
    inputs = segment * (STEPS * TILE_INPUTS) + tl.arange(0, TILE_INPUTS)
    x_at = x + row * X_STRIDE + (tl.arange(0, TILE_ROWS)[None, :] * X_STRIDE + inputs[:, None])
    w_at = w + outputs[:, None].to(tl.int64) * NUM_INPUTS + inputs[None, :]
    sums = tl.zeros((TILE_COLUMNS, TILE_ROWS), tl.float32)
    for step in range(STEPS):
        is_input = inputs + step * TILE_INPUTS < NUM_INPUTS
        right = _loaded(x_at, is_input[:, None], HAS_ALL)
        left = _loaded(w_at, is_column[:, None] & is_input[None, :], HAS_ALL and IS_WHOLE)
        sums = tl.dot(left, right, sums, input_precision="ieee")
        x_at += TILE_INPUTS
        w_at += TILE_INPUTS
    return sums


@triton.jit
def _in_piece(inputs):
    """Where the bytes of a group are in a block of its panel, for the panel's first output: in pieces of PIECE bytes
    of every output."""
    return inputs // PIECE * (PANEL * PIECE) + inputs % PIECE


@triton.jit
def _low_halves(packed):
    return tl.inline_asm_elementwise("and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [packed], tl.int8, is_pure=True, pack=4)


@triton.jit
def _upper_halves(packed):
    return tl.inline_asm_elementwise(
        "shr.b32 $0, $1, 4; and.b32 $0, $0, 0x0F0F0F0F;", "=r,r", [packed], tl.int8, is_pure=True, pack=4
    )


@triton.jit
def _segment_of_integers(
    x, x_scales, w, w_scales, row_scales, row, outputs, is_column, segment,
    FORMAT: tl.constexpr, X_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr, IS_WHOLE: tl.constexpr,
    NUM_INPUTS: tl.constexpr, SEGMENTS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """Groups of TILE_INPUTS inputs are summed as integers, which is exact, and groups as floats, in order. A step has
    two groups; in int4 they share their bytes.

    `w`, `w_scales`: as `builder.targets.cuda.integers` packs them.
    """
    PAIRS: tl.constexpr = (NUM_INPUTS + 2 * TILE_INPUTS - 1) // (2 * TILE_INPUTS)
    STEPS: tl.constexpr = (PAIRS + SEGMENTS - 1) // SEGMENTS
    HAS_ALL: tl.constexpr = PAIRS % SEGMENTS == 0
    HAS_BOTH: tl.constexpr = HAS_ALL and IS_WHOLE
    IS_INT8: tl.constexpr = FORMAT == "int8"
    GROUP: tl.constexpr = PANEL * TILE_INPUTS  # bytes of a panel
    PAIR: tl.constexpr = 2 * GROUP if IS_INT8 else GROUP
    SCALES: tl.constexpr = PANEL if IS_INT8 else 2 * PANEL  # of a group, with zero points
    inputs, rows, first = tl.arange(0, TILE_INPUTS), tl.arange(0, TILE_ROWS), segment * STEPS
    pairs, places = (outputs // PANEL).to(tl.int64) * PAIRS + first, outputs % PANEL
    # distances between rows are constants, so that a thread needs one address for all of its rows
    x_at = x + (row * X_STRIDE + first * 2 * TILE_INPUTS) + (rows[None, :] * X_STRIDE + inputs[:, None])
    x_scales_at = x_scales + (row * SCALES_STRIDE + first * 2) + rows * SCALES_STRIDE
    w_at = w + (pairs * PAIR + places * PIECE)[:, None] + _in_piece(inputs)[None, :]
    w_scales_at = w_scales + pairs * (2 * SCALES) + places
    sums = tl.zeros((TILE_COLUMNS, TILE_ROWS), tl.float32)
    for step in range(STEPS):
        is_pair = first + step + tl.arange(0, 1) < PAIRS
        is_output = is_column & is_pair
        if IS_INT8:
            of_rows = _pair(x_scales_at, is_pair, HAS_ALL)
        else:
            packed = _loaded(w_at, is_output[:, None], HAS_BOTH)
        for half in tl.static_range(2):
            right = _loaded(x_at + half * TILE_INPUTS, is_pair[None, :], HAS_ALL)
            if IS_INT8:
                left = _loaded(w_at + half * GROUP, is_output[:, None], HAS_BOTH)
            else:
                left = _upper_halves(packed) if half else _low_halves(packed)
            products = tl.dot(left, right, out_dtype=tl.int32).to(tl.float32)
            codes = _loaded(w_scales_at + half * SCALES, is_output, HAS_BOTH).to(tl.float32)[:, None]
            if IS_INT8:
                sums = tl.fma(products, of_rows[half][None, :] * codes, sums)
            else:  # (value - zero point) * scale, which is a code's square; pairs of scales would spill on sm_100
                zeros = _loaded(w_scales_at + (half * SCALES + PANEL), is_output, HAS_BOTH).to(tl.float32)[:, None]
                of_rows = _loaded(x_scales_at + half, is_pair, HAS_ALL)[None, :]
                sums_of_rows = _loaded(x_scales_at + (2 * PAIRS + half), is_pair, HAS_ALL)[None, :]
                scaled = tl.fma(zeros * -0.0625, sums_of_rows, products * of_rows)
                sums = tl.fma(scaled, codes * codes, sums)
        x_at += 2 * TILE_INPUTS
        w_at += PAIR
        x_scales_at += 2
        w_scales_at += 2 * SCALES
    return sums * tl.load(row_scales + outputs, mask=is_column, other=0.0)[:, None]


@triton.jit
def segment_of(
    x, x_scales, w, w_scales, row_scales, row, outputs, is_column, segment,
    FORMAT: tl.constexpr, X_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr, IS_WHOLE: tl.constexpr,
    NUM_INPUTS: tl.constexpr, SEGMENTS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """The sums of one run of inputs, [TILE_COLUMNS, TILE_ROWS], of these outputs of the weight and the rows from `row`
    on."""
    if FORMAT == "float":
        return _segment_of_floats(
            x, w, row, outputs, is_column, segment,
            X_STRIDE, IS_WHOLE, NUM_INPUTS, SEGMENTS, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
        )  # fmt: skip
    else:
        return _segment_of_integers(
            x, x_scales, w, w_scales, row_scales, row, outputs, is_column, segment,
            FORMAT, X_STRIDE, SCALES_STRIDE, IS_WHOLE, NUM_INPUTS, SEGMENTS, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
        )  # fmt: skip
