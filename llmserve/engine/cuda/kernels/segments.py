"""Sums of one run of a weight's inputs, by matrix instructions: of floats, bytes and halves of bytes.

`linear.py` says what FORMAT is, and how a tile of sums lies.
"""

from __future__ import annotations

import triton
import triton.language as tl

PANEL: tl.constexpr = tl.constexpr(32)  # `layout.PANEL_OUTPUTS`
PIECE: tl.constexpr = tl.constexpr(16)  # `layout.PIECE_BYTES`


@triton.jit
def _segment_of_floats(
    x, w, rows, outputs, is_column, segment,
    X_STRIDE: tl.constexpr, IS_WHOLE: tl.constexpr, NUM_INPUTS: tl.constexpr, SEGMENTS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """`w`: row-major. IS_WHOLE: no output of the tile is too many."""
    STEPS: tl.constexpr = (NUM_INPUTS + TILE_INPUTS * SEGMENTS - 1) // (TILE_INPUTS * SEGMENTS)
    inputs = segment * (STEPS * TILE_INPUTS) + tl.arange(0, TILE_INPUTS)
    x_at = x + rows[None, :].to(tl.int64) * X_STRIDE + inputs[:, None]
    w_at = w + outputs[:, None].to(tl.int64) * NUM_INPUTS + inputs[None, :]
    sums = tl.zeros((TILE_COLUMNS, TILE_ROWS), tl.float32)
    for step in range(STEPS):
        is_input = inputs + step * TILE_INPUTS < NUM_INPUTS
        if NUM_INPUTS % (TILE_INPUTS * SEGMENTS) == 0:
            right = tl.load(x_at)
        else:
            right = tl.load(x_at, mask=is_input[:, None], other=0.0)
        if NUM_INPUTS % (TILE_INPUTS * SEGMENTS) == 0 and IS_WHOLE:
            left = tl.load(w_at)
        else:
            left = tl.load(w_at, mask=is_column[:, None] & is_input[None, :], other=0.0)
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
def _segment_of_integers(
    x, x_scales, w, w_scales, row_scales, rows, outputs, is_column, segment,
    X_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr, IS_WHOLE: tl.constexpr, NUM_INPUTS: tl.constexpr,
    SEGMENTS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """Groups of TILE_INPUTS inputs are summed as integers, which is exact, and groups as floats, in order.

    `w`, `w_scales`: as `builder.targets.cuda.integers` packs them.
    """
    GROUPS: tl.constexpr = (NUM_INPUTS + 2 * TILE_INPUTS - 1) // (2 * TILE_INPUTS) * 2
    STEPS: tl.constexpr = (GROUPS + SEGMENTS - 1) // SEGMENTS
    inputs = tl.arange(0, TILE_INPUTS)
    first = segment * STEPS
    wide_rows = rows.to(tl.int64)
    panels, places = (outputs // PANEL).to(tl.int64) * GROUPS, outputs % PANEL
    x_at = x + wide_rows[None, :] * X_STRIDE + (first * TILE_INPUTS + inputs)[:, None]
    w_at = w + ((panels + first) * (PANEL * TILE_INPUTS) + places * PIECE)[:, None] + _in_piece(inputs)[None, :]
    x_scales_at = x_scales + wide_rows * SCALES_STRIDE + first
    w_scales_at = w_scales + (panels + first) * PANEL + places
    sums = tl.zeros((TILE_COLUMNS, TILE_ROWS), tl.float32)
    for step in range(STEPS):
        is_group = first + step + tl.arange(0, 1) < GROUPS
        if GROUPS % SEGMENTS == 0:
            right, of_rows = tl.load(x_at), tl.load(x_scales_at)
        else:
            right = tl.load(x_at, mask=is_group[None, :], other=0)
            of_rows = tl.load(x_scales_at, mask=is_group, other=0.0)
        if GROUPS % SEGMENTS == 0 and IS_WHOLE:
            left, of_columns = tl.load(w_at), tl.load(w_scales_at)
        else:
            left = tl.load(w_at, mask=is_column[:, None] & is_group[:, None], other=0)
            of_columns = tl.load(w_scales_at, mask=is_column & is_group, other=0.0)
        products = tl.dot(left, right, out_dtype=tl.int32)
        sums += products.to(tl.float32) * (of_rows[None, :] * of_columns.to(tl.float32)[:, None])
        x_at += TILE_INPUTS
        w_at += PANEL * TILE_INPUTS
        x_scales_at += 1
        w_scales_at += PANEL
    return sums * tl.load(row_scales + outputs, mask=is_column, other=0.0)[:, None]


@triton.jit
def _with_group(
    sums, x_at, x_scales_at, w_scales_at, values, is_row, is_column,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Sums and the products of one group: of (value - zero point) * step, where the step is a code's square."""
    right = tl.load(x_at, mask=is_row[None, :], other=0)
    of_rows = tl.load(x_scales_at, mask=is_row, other=0.0)
    sums_of_rows = tl.load(x_scales_at + GROUPS, mask=is_row, other=0.0)
    codes = tl.load(w_scales_at, mask=is_column, other=0).to(tl.float32)
    zeros = tl.load(w_scales_at + PANEL, mask=is_column, other=0).to(tl.float32) * 0.0625
    steps = codes * codes
    products = tl.dot(values.to(tl.int8), right, out_dtype=tl.int32).to(tl.float32)
    scaled = products * (of_rows[None, :] * steps[:, None])
    return sums + (scaled - sums_of_rows[None, :] * (steps * zeros)[:, None])


@triton.jit
def _segment_of_nibbles(
    x, x_scales, w, w_scales, row_scales, rows, outputs, is_column, segment,
    X_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr, NUM_INPUTS: tl.constexpr, SEGMENTS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """As `_segment_of_integers`, over pairs of groups: the second has the upper halves of the bytes."""
    PAIRS: tl.constexpr = (NUM_INPUTS + 2 * TILE_INPUTS - 1) // (2 * TILE_INPUTS)
    STEPS: tl.constexpr = (PAIRS + SEGMENTS - 1) // SEGMENTS
    inputs = tl.arange(0, TILE_INPUTS)
    first = segment * STEPS
    wide_rows = rows.to(tl.int64)
    pairs, places = (outputs // PANEL).to(tl.int64) * PAIRS + first, outputs % PANEL
    x_at = x + wide_rows[None, :] * X_STRIDE + (first * 2 * TILE_INPUTS + inputs)[:, None]
    w_at = w + (pairs * (PANEL * TILE_INPUTS) + places * PIECE)[:, None] + _in_piece(inputs)[None, :]
    x_scales_at = x_scales + wide_rows * SCALES_STRIDE + 2 * first
    w_scales_at = w_scales + pairs * (4 * PANEL) + places
    sums = tl.zeros((TILE_COLUMNS, TILE_ROWS), tl.float32)
    for step in range(STEPS):
        is_pair = first + step + tl.arange(0, 1) < PAIRS
        is_row, is_output = (rows >= 0) & is_pair, is_column & is_pair
        packed = tl.load(w_at, mask=is_output[:, None], other=0)
        sums = _with_group(
            sums, x_at, x_scales_at, w_scales_at, packed & 15, is_row, is_output, 2 * PAIRS,
        )  # fmt: skip
        sums = _with_group(
            sums, x_at + TILE_INPUTS, x_scales_at + 1, w_scales_at + 2 * PANEL, packed >> 4, is_row, is_output,
            2 * PAIRS,
        )  # fmt: skip
        x_at += 2 * TILE_INPUTS
        w_at += PANEL * TILE_INPUTS
        x_scales_at += 2
        w_scales_at += 4 * PANEL
    return sums * tl.load(row_scales + outputs, mask=is_column, other=0.0)[:, None]


@triton.jit
def segment_of(
    x, x_scales, w, w_scales, row_scales, rows, outputs, is_column, segment,
    FORMAT: tl.constexpr, X_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr, IS_WHOLE: tl.constexpr,
    NUM_INPUTS: tl.constexpr, SEGMENTS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """The sums of one run of inputs, [TILE_COLUMNS, TILE_ROWS], of these outputs of the weight."""
    if FORMAT == "int8":
        return _segment_of_integers(
            x, x_scales, w, w_scales, row_scales, rows, outputs, is_column, segment,
            X_STRIDE, SCALES_STRIDE, IS_WHOLE, NUM_INPUTS, SEGMENTS, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
        )  # fmt: skip
    elif FORMAT == "int4":
        return _segment_of_nibbles(
            x, x_scales, w, w_scales, row_scales, rows, outputs, is_column, segment,
            X_STRIDE, SCALES_STRIDE, NUM_INPUTS, SEGMENTS, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
        )  # fmt: skip
    else:
        return _segment_of_floats(
            x, w, rows, outputs, is_column, segment,
            X_STRIDE, IS_WHOLE, NUM_INPUTS, SEGMENTS, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
        )  # fmt: skip
