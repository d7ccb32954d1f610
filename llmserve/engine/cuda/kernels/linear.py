"""Products of rows with a weight, and what is done to their sums.

FORMAT says how rows and weight are kept: "float", or, with scales for every TILE_INPUTS inputs of both and one for each
output, "int8", or "int4" with a zero point beside each scale. What a format has not is any address.

The inputs of a weight are summed in SEGMENTS runs, each from zero, and the runs are added up in order: `linear` does
all of it, `linear_segments` and `words_segments` a run in each program, for few rows, so that more of the device reads
the weight, and `add_segments` the rest. All do the same additions, so a row has the same bits whichever runs.

A tile of sums is [outputs, rows]: instructions want 64 of their first dimension, and there are always as many outputs,
but often few rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmserve.engine.cuda.kernels.activations import activate, soft_capped
from llmserve.engine.cuda.kernels.rowwise import mean_of_squares, store_rounded
from llmserve.engine.cuda.kernels.segments import segment_of
from llmserve.engine.cuda.kernels.words import words_of_bytes, words_of_nibbles


@triton.jit
def _product(
    x, x_scales, w, w_scales, row_scales, row, outputs, is_column,
    FORMAT: tl.constexpr, X_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr, IS_WHOLE: tl.constexpr,
    NUM_INPUTS: tl.constexpr, SEGMENTS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """The sums of all runs, added up in order."""
    sums = segment_of(
        x, x_scales, w, w_scales, row_scales, row, outputs, is_column, 0, FORMAT,
        X_STRIDE, SCALES_STRIDE, IS_WHOLE, NUM_INPUTS, SEGMENTS, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
    )  # fmt: skip
    for segment in range(1, SEGMENTS):
        sums += segment_of(
            x, x_scales, w, w_scales, row_scales, row, outputs, is_column, segment, FORMAT,
            X_STRIDE, SCALES_STRIDE, IS_WHOLE, NUM_INPUTS, SEGMENTS, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
        )  # fmt: skip
    return sums


@triton.jit
def _store(
    sums, bias, residual, y, rows, columns,
    NUM_COLUMNS: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Bias, scale, soft cap and residual, in this order; what is 1 or 0 is left out. Returns the stored numbers."""
    is_column = (columns < NUM_COLUMNS)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=columns < NUM_COLUMNS, other=0.0).to(tl.float32)[:, None]
    if SCALE != 1.0:
        sums = sums * SCALE
    if SOFT_CAP != 0.0:
        sums = soft_capped(sums, SOFT_CAP)
    wide_rows = rows[None, :].to(tl.int64)
    if HAS_RESIDUAL:
        at = residual + wide_rows * RESIDUAL_STRIDE + columns[:, None]
        sums = tl.load(at, mask=is_column, other=0.0).to(tl.float32) + sums
    tl.store(y + wide_rows * Y_STRIDE + columns[:, None], sums.to(y.dtype.element_ty), mask=is_column)
    return sums


@triton.jit
def linear(
    x, x_scales, w, w_scales, row_scales, bias, residual, y,
    FORMAT: tl.constexpr, X_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, NUM_COLUMNS: tl.constexpr,
    NUM_INPUTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr, SEGMENTS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """y = residual + soft_cap(scale * (x @ w.T + bias)). Grid: tiles of rows, of columns."""
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS
    rows = row + tl.arange(0, TILE_ROWS)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    sums = _product(
        x, x_scales, w, w_scales, row_scales, row, columns, columns < NUM_COLUMNS, FORMAT,
        X_STRIDE, SCALES_STRIDE, NUM_COLUMNS % TILE_COLUMNS == 0, NUM_INPUTS, SEGMENTS, TILE_ROWS, TILE_COLUMNS,
        TILE_INPUTS,
    )  # fmt: skip
    _store(
        sums, bias, residual, y, rows, columns,
        NUM_COLUMNS, RESIDUAL_STRIDE, Y_STRIDE, HAS_BIAS, HAS_RESIDUAL, SCALE, SOFT_CAP,
    )  # fmt: skip


@triton.jit
def gated_linear(
    x, x_scales, w, w_scales, row_scales, y,
    FORMAT: tl.constexpr, X_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr, NUM_COLUMNS: tl.constexpr, NUM_INPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr, SEGMENTS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """y = activation(x @ gate.T) * (x @ up.T); `w` has the NUM_COLUMNS rows of gate, then those of up.

    A tile has as many outputs of both. Grid: tiles of rows, of half as many columns.
    """
    HALF: tl.constexpr = TILE_COLUMNS // 2
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS
    rows = row + tl.arange(0, TILE_ROWS)
    both = tl.arange(0, TILE_COLUMNS)
    of_both = tl.program_id(1) * HALF + both % HALF
    sums = _product(
        x, x_scales, w, w_scales, row_scales, row, of_both + both // HALF * NUM_COLUMNS, of_both < NUM_COLUMNS,
        FORMAT, X_STRIDE, SCALES_STRIDE, NUM_COLUMNS % HALF == 0, NUM_INPUTS, SEGMENTS, TILE_ROWS, TILE_COLUMNS,
        TILE_INPUTS,
    )  # fmt: skip
    gate, up = tl.split(tl.permute(tl.reshape(sums, (2, HALF, TILE_ROWS)), (1, 2, 0)))
    columns = tl.program_id(1) * HALF + tl.arange(0, HALF)
    at = y + rows[None, :] * Y_STRIDE + columns[:, None]
    tl.store(at, (activate(gate, ACTIVATION) * up).to(y.dtype.element_ty), mask=(columns < NUM_COLUMNS)[:, None])


@triton.jit
def linear_segments(
    x, x_scales, w, w_scales, row_scales, parts,
    FORMAT: tl.constexpr, X_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr,
    NUM_COLUMNS: tl.constexpr, NUM_INPUTS: tl.constexpr, SEGMENTS: tl.constexpr,
    MAX_ROWS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """parts[segment] = the sums of one run, float32 [SEGMENTS, MAX_ROWS, NUM_COLUMNS].

    Grid: tiles of rows, of columns, segments.
    """
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS
    rows = row + tl.arange(0, TILE_ROWS)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    segment = tl.program_id(2)
    sums = segment_of(
        x, x_scales, w, w_scales, row_scales, row, columns, columns < NUM_COLUMNS, segment, FORMAT,
        X_STRIDE, SCALES_STRIDE, NUM_COLUMNS % TILE_COLUMNS == 0, NUM_INPUTS, SEGMENTS, TILE_ROWS, TILE_COLUMNS,
        TILE_INPUTS,
    )  # fmt: skip
    at = parts + (segment * MAX_ROWS + rows)[None, :] * NUM_COLUMNS + columns[:, None]
    tl.store(at, sums, mask=(rows < MAX_ROWS)[None, :] & (columns < NUM_COLUMNS)[:, None])


@triton.jit
def words_segments(
    x, x_scales, w, w_scales, row_scales, parts,
    FORMAT: tl.constexpr, X_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr,
    NUM_COLUMNS: tl.constexpr, NUM_INPUTS: tl.constexpr, SEGMENTS: tl.constexpr,
    MAX_ROWS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """`linear_segments` of integers for few rows, without matrix instructions: each thread has an output, and four of
    its integers in a word. As what is summed as integers is exact, the bits are those of `linear_segments`.

    `x`, `w`: as words. X_STRIDE and TILE_INPUTS count integers. Grid: tiles of rows, of columns, segments.
    """
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    segment = tl.program_id(2)
    if FORMAT == "int8":
        sums = words_of_bytes(
            x, x_scales, w, w_scales, row, columns, segment,
            X_STRIDE, SCALES_STRIDE, NUM_COLUMNS, NUM_INPUTS, SEGMENTS, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
        )  # fmt: skip
    else:
        sums = words_of_nibbles(
            x, x_scales, w, w_scales, row, columns, segment,
            X_STRIDE, SCALES_STRIDE, NUM_COLUMNS, NUM_INPUTS, SEGMENTS, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
        )  # fmt: skip
    of_outputs = tl.load(row_scales + columns, mask=columns < NUM_COLUMNS, other=0.0)
    for r in tl.static_range(TILE_ROWS):
        at = parts + (segment * MAX_ROWS + row + r) * NUM_COLUMNS + columns
        tl.store(at, sums[r] * of_outputs, mask=columns < NUM_COLUMNS)


@triton.jit
def _added(parts, rows, columns, is_column, NUM_COLUMNS: tl.constexpr, SEGMENTS: tl.constexpr, MAX_ROWS: tl.constexpr):
    """The runs of these columns, [columns, rows], added up in order."""
    at = parts + rows[None, :].to(tl.int64) * NUM_COLUMNS + columns[:, None]
    sums = tl.load(at, mask=is_column[:, None], other=0.0)
    for segment in tl.static_range(1, SEGMENTS):
        sums += tl.load(at + segment * MAX_ROWS * NUM_COLUMNS, mask=is_column[:, None], other=0.0)
    return sums


@triton.jit
def add_segments(
    parts, bias, residual, y,
    RESIDUAL_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, NUM_COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, SEGMENTS: tl.constexpr,
    MAX_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """What `linear` does behind its products. Grid: rows, tiles of columns."""
    rows = tl.program_id(0) + tl.arange(0, 1)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    sums = _added(parts, rows, columns, columns < NUM_COLUMNS, NUM_COLUMNS, SEGMENTS, MAX_ROWS)
    _store(
        sums, bias, residual, y, rows, columns,
        NUM_COLUMNS, RESIDUAL_STRIDE, Y_STRIDE, HAS_BIAS, HAS_RESIDUAL, SCALE, SOFT_CAP,
    )  # fmt: skip


@triton.jit
def add_normed_segments(
    parts, bias, residual, y, weight, normed,
    RESIDUAL_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, NUM_COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, SEGMENTS: tl.constexpr,
    MAX_ROWS: tl.constexpr, EPS: tl.constexpr, NORMED_STRIDE: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """`add_segments` and `rowwise.rms_norm` in one, for a float32 y. Grid: rows; TILE_COLUMNS is at least NUM_COLUMNS.

    The sums are transposed to the norm's shape and layout, so that it adds up their squares in the same order.
    """
    rows = tl.program_id(0) + tl.arange(0, 1)
    columns = tl.arange(0, TILE_COLUMNS)
    is_column = columns < NUM_COLUMNS
    sums = _added(parts, rows, columns, is_column, NUM_COLUMNS, SEGMENTS, MAX_ROWS)
    values = tl.trans(_store(
        sums, bias, residual, y, rows, columns,
        NUM_COLUMNS, RESIDUAL_STRIDE, Y_STRIDE, HAS_BIAS, HAS_RESIDUAL, SCALE, SOFT_CAP,
    ))  # fmt: skip
    scale = 1.0 / tl.sqrt_rn(mean_of_squares(values, NUM_COLUMNS, 1, TILE_COLUMNS) + EPS)
    values = values * scale[:, None] * tl.load(weight + columns, mask=is_column, other=0.0)[None, :]
    at = normed + rows[:, None].to(tl.int64) * NORMED_STRIDE + columns[None, :]
    tl.store(at, values.to(normed.dtype.element_ty), mask=is_column[None, :])


@triton.jit
def add_gated_segments(
    parts, y,
    Y_STRIDE: tl.constexpr, NUM_COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, SEGMENTS: tl.constexpr,
    MAX_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """What `gated_linear` does behind its products. Grid: rows, tiles of columns."""
    rows = tl.program_id(0) + tl.arange(0, 1)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_column = columns < NUM_COLUMNS
    gate = _added(parts, rows, columns, is_column, 2 * NUM_COLUMNS, SEGMENTS, MAX_ROWS)
    up = _added(parts, rows, columns + NUM_COLUMNS, is_column, 2 * NUM_COLUMNS, SEGMENTS, MAX_ROWS)
    at = y + rows[None, :].to(tl.int64) * Y_STRIDE + columns[:, None]
    tl.store(at, (activate(gate, ACTIVATION) * up).to(y.dtype.element_ty), mask=is_column[:, None])


@triton.jit
def add_rounded_segments(
    parts, integers, scales,
    WIDTH: tl.constexpr, Y_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, ACTIVATION: tl.constexpr, SEGMENTS: tl.constexpr, MAX_ROWS: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """`add_gated_segments` and `rowwise.round_rows` in one, where only integers are wanted. Grid: rows, tiles of
    groups."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
    at = (groups * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    gates = parts + row * (2 * WIDTH) + at
    gate, up = tl.load(gates, mask=at < WIDTH, other=0.0), tl.load(gates + WIDTH, mask=at < WIDTH, other=0.0)
    for segment in tl.static_range(1, SEGMENTS):
        begin = segment * MAX_ROWS * 2 * WIDTH
        gate += tl.load(gates + begin, mask=at < WIDTH, other=0.0)
        up += tl.load(gates + begin + WIDTH, mask=at < WIDTH, other=0.0)
    values = activate(gate, ACTIVATION) * up
    store_rounded(values, integers, scales, row, groups, at, Y_STRIDE, SCALES_STRIDE, GROUPS)
