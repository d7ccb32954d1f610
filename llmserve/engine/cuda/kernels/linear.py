"""Products of rows with a weight, and what is done to their sums.

FORMAT says how rows and weight are kept: "float", or, with scales for every TILE_INPUTS inputs of both and one for each
output, "int8", or "int4" with a zero point beside each scale. What a format has not is any address.

The inputs of a weight are summed in SEGMENTS runs, each from zero, and the runs are added up in order: `linear` does
all of it, `linear_segments` a run in each program, for few rows, so that more of the device reads the weight, and
`add_segments` the rest. Both do the same additions, so a row has the same bits whichever runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmserve.engine.cuda.kernels.activations import activate, soft_capped

PANEL: tl.constexpr = tl.constexpr(32)  # `layout.PANEL_OUTPUTS`


@triton.jit
def _segment_of_floats(
    x, w, rows, outputs, is_column, segment,
    X_STRIDE: tl.constexpr, NUM_COLUMNS: tl.constexpr, NUM_INPUTS: tl.constexpr, SEGMENTS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """`w`: row-major."""
    STEPS: tl.constexpr = (NUM_INPUTS + TILE_INPUTS * SEGMENTS - 1) // (TILE_INPUTS * SEGMENTS)
    inputs = segment * (STEPS * TILE_INPUTS) + tl.arange(0, TILE_INPUTS)
    x_at = x + rows[:, None].to(tl.int64) * X_STRIDE + inputs[None, :]
    w_at = w + outputs[:, None].to(tl.int64) * NUM_INPUTS + inputs[None, :]
    sums = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
    for step in range(STEPS):
        is_input = inputs + step * TILE_INPUTS < NUM_INPUTS
        if NUM_INPUTS % (TILE_INPUTS * SEGMENTS) == 0:
            left = tl.load(x_at)
        else:
            left = tl.load(x_at, mask=is_input[None, :], other=0.0)
        if NUM_INPUTS % (TILE_INPUTS * SEGMENTS) == 0 and NUM_COLUMNS % TILE_COLUMNS == 0:
            right = tl.load(w_at)
        else:
            right = tl.load(w_at, mask=is_column[:, None] & is_input[None, :], other=0.0)
        sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
        x_at += TILE_INPUTS
        w_at += TILE_INPUTS
    return sums


@triton.jit
def _segment_of_integers(
    x, x_scales, w, w_scales, row_scales, rows, outputs, is_column, segment,
    X_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr, NUM_COLUMNS: tl.constexpr, NUM_INPUTS: tl.constexpr,
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
    x_at = x + wide_rows[:, None] * X_STRIDE + (first * TILE_INPUTS + inputs)[None, :]
    w_at = w + ((panels + first) * (PANEL * TILE_INPUTS) + places * TILE_INPUTS)[:, None] + inputs[None, :]
    x_scales_at = x_scales + wide_rows * SCALES_STRIDE + first
    w_scales_at = w_scales + (panels + first) * PANEL + places
    sums = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
    for step in range(STEPS):
        is_group = first + step + tl.arange(0, 1) < GROUPS
        if GROUPS % SEGMENTS == 0:
            left, of_rows = tl.load(x_at), tl.load(x_scales_at)
        else:
            left = tl.load(x_at, mask=is_group[:, None], other=0)
            of_rows = tl.load(x_scales_at, mask=is_group, other=0.0)
        if GROUPS % SEGMENTS == 0 and NUM_COLUMNS % TILE_COLUMNS == 0:
            right, of_columns = tl.load(w_at), tl.load(w_scales_at)
        else:
            right = tl.load(w_at, mask=is_column[:, None] & is_group[:, None], other=0)
            of_columns = tl.load(w_scales_at, mask=is_column & is_group, other=0.0)
        products = tl.dot(left, tl.trans(right), out_dtype=tl.int32)
        sums += products.to(tl.float32) * (of_rows[:, None] * of_columns.to(tl.float32)[None, :])
        x_at += TILE_INPUTS
        w_at += PANEL * TILE_INPUTS
        x_scales_at += 1
        w_scales_at += PANEL
    return sums * tl.load(row_scales + outputs, mask=is_column, other=0.0)[None, :]


@triton.jit
def _with_group(
    sums, x_at, x_scales_at, w_scales_at, values, is_row, is_column,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Sums and the products of one group: of (value - zero point) * step, where the step is a code's square."""
    left = tl.load(x_at, mask=is_row[:, None], other=0)
    of_rows = tl.load(x_scales_at, mask=is_row, other=0.0)
    sums_of_rows = tl.load(x_scales_at + GROUPS, mask=is_row, other=0.0)
    codes = tl.load(w_scales_at, mask=is_column, other=0).to(tl.float32)
    zeros = tl.load(w_scales_at + PANEL, mask=is_column, other=0).to(tl.float32) * 0.0625
    steps = codes * codes
    products = tl.dot(left, tl.trans(values.to(tl.int8)), out_dtype=tl.int32).to(tl.float32)
    scaled = products * (of_rows[:, None] * steps[None, :])
    return sums + (scaled - sums_of_rows[:, None] * (steps * zeros)[None, :])


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
    x_at = x + wide_rows[:, None] * X_STRIDE + (first * 2 * TILE_INPUTS + inputs)[None, :]
    w_at = w + (pairs * (PANEL * TILE_INPUTS) + places * TILE_INPUTS)[:, None] + inputs[None, :]
    x_scales_at = x_scales + wide_rows * SCALES_STRIDE + 2 * first
    w_scales_at = w_scales + pairs * (4 * PANEL) + places
    sums = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
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
    return sums * tl.load(row_scales + outputs, mask=is_column, other=0.0)[None, :]


@triton.jit
def _segment(
    x, x_scales, w, w_scales, row_scales, rows, columns, first_output, segment,
    FORMAT: tl.constexpr, X_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr, NUM_COLUMNS: tl.constexpr,
    NUM_INPUTS: tl.constexpr, SEGMENTS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """The sums of one run of inputs, [TILE_ROWS, TILE_COLUMNS]. Columns are those outputs of the weight from
    `first_output` on."""
    is_column = columns < NUM_COLUMNS
    if FORMAT == "int8":
        return _segment_of_integers(
            x, x_scales, w, w_scales, row_scales, rows, first_output + columns, is_column, segment,
            X_STRIDE, SCALES_STRIDE, NUM_COLUMNS, NUM_INPUTS, SEGMENTS, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
        )  # fmt: skip
    elif FORMAT == "int4":
        return _segment_of_nibbles(
            x, x_scales, w, w_scales, row_scales, rows, first_output + columns, is_column, segment,
            X_STRIDE, SCALES_STRIDE, NUM_INPUTS, SEGMENTS, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
        )  # fmt: skip
    else:
        return _segment_of_floats(
            x, w, rows, first_output + columns, is_column, segment,
            X_STRIDE, NUM_COLUMNS, NUM_INPUTS, SEGMENTS, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
        )  # fmt: skip


@triton.jit
def _product(
    x, x_scales, w, w_scales, row_scales, rows, columns, first_output,
    FORMAT: tl.constexpr, X_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr, NUM_COLUMNS: tl.constexpr,
    NUM_INPUTS: tl.constexpr, SEGMENTS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """The sums of all runs, added up in order."""
    sums = _segment(
        x, x_scales, w, w_scales, row_scales, rows, columns, first_output, 0, FORMAT,
        X_STRIDE, SCALES_STRIDE, NUM_COLUMNS, NUM_INPUTS, SEGMENTS, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
    )  # fmt: skip
    for segment in range(1, SEGMENTS):
        sums += _segment(
            x, x_scales, w, w_scales, row_scales, rows, columns, first_output, segment, FORMAT,
            X_STRIDE, SCALES_STRIDE, NUM_COLUMNS, NUM_INPUTS, SEGMENTS, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
        )  # fmt: skip
    return sums


@triton.jit
def _store(
    sums, bias, residual, y, rows, columns,
    NUM_COLUMNS: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Bias, scale, soft cap and residual, in this order; what is 1 or 0 is left out."""
    is_column = columns < NUM_COLUMNS
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if SCALE != 1.0:
        sums = sums * SCALE
    if SOFT_CAP != 0.0:
        sums = soft_capped(sums, SOFT_CAP)
    wide_rows = rows[:, None].to(tl.int64)
    if HAS_RESIDUAL:
        at = residual + wide_rows * RESIDUAL_STRIDE + columns[None, :]
        sums = tl.load(at, mask=is_column[None, :], other=0.0).to(tl.float32) + sums
    tl.store(y + wide_rows * Y_STRIDE + columns[None, :], sums.to(y.dtype.element_ty), mask=is_column[None, :])


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
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    sums = _product(
        x, x_scales, w, w_scales, row_scales, rows, columns, 0, FORMAT,
        X_STRIDE, SCALES_STRIDE, NUM_COLUMNS, NUM_INPUTS, SEGMENTS, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
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
    """y = activation(x @ gate.T) * (x @ up.T); `w` has the NUM_COLUMNS rows of gate, then those of up."""
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    gate = _product(
        x, x_scales, w, w_scales, row_scales, rows, columns, 0, FORMAT,
        X_STRIDE, SCALES_STRIDE, NUM_COLUMNS, NUM_INPUTS, SEGMENTS, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
    )  # fmt: skip
    up = _product(
        x, x_scales, w, w_scales, row_scales, rows, columns, NUM_COLUMNS, FORMAT,
        X_STRIDE, SCALES_STRIDE, NUM_COLUMNS, NUM_INPUTS, SEGMENTS, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
    )  # fmt: skip
    at = y + rows[:, None].to(tl.int64) * Y_STRIDE + columns[None, :]
    tl.store(at, (activate(gate, ACTIVATION) * up).to(y.dtype.element_ty), mask=(columns < NUM_COLUMNS)[None, :])


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
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    segment = tl.program_id(2)
    sums = _segment(
        x, x_scales, w, w_scales, row_scales, rows, columns, 0, segment, FORMAT,
        X_STRIDE, SCALES_STRIDE, NUM_COLUMNS, NUM_INPUTS, SEGMENTS, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
    )  # fmt: skip
    at = parts + (segment * MAX_ROWS + rows)[:, None].to(tl.int64) * NUM_COLUMNS + columns[None, :]
    tl.store(at, sums, mask=(rows < MAX_ROWS)[:, None] & (columns < NUM_COLUMNS)[None, :])


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
    at = parts + rows[:, None].to(tl.int64) * NUM_COLUMNS + columns[None, :]
    is_column = (columns < NUM_COLUMNS)[None, :]
    sums = tl.load(at, mask=is_column, other=0.0)
    for segment in tl.static_range(1, SEGMENTS):
        sums += tl.load(at + segment * MAX_ROWS * NUM_COLUMNS, mask=is_column, other=0.0)
    _store(
        sums, bias, residual, y, rows, columns,
        NUM_COLUMNS, RESIDUAL_STRIDE, Y_STRIDE, HAS_BIAS, HAS_RESIDUAL, SCALE, SOFT_CAP,
    )  # fmt: skip
