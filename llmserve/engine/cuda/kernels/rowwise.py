"""What is done to each row by itself. Grid of all: rows; of those that are wide: and tiles of columns."""

from __future__ import annotations

import triton
import triton.language as tl

from llmserve.engine.cuda.kernels.activations import activate, sigmoid
from llmserve.engine.cuda.kernels.rounding import rounded

MOST_HALVINGS = tl.constexpr(20)  # of the columns in a tile


@triton.jit
def token_of(token_ids, chosen, row):
    """token_ids[row]; where that is negative, chosen[-1 - token_ids[row]]."""
    token = tl.load(token_ids + row)
    if token < 0:
        token = tl.load(chosen - 1 - token)
    return token


@triton.jit
def embed(
    token_ids, chosen, table, y,
    WIDTH: tl.constexpr, Y_STRIDE: tl.constexpr, SCALE: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """y[t] = scale * table[token_of(t)]"""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    token = token_of(token_ids, chosen, row).to(tl.int64)
    values = tl.load(table + token * WIDTH + columns, mask=columns < WIDTH).to(tl.float32)
    tl.store(y + row * Y_STRIDE + columns, (values * SCALE).to(y.dtype.element_ty), mask=columns < WIDTH)


@triton.jit
def _groups(
    x, row,
    GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, X_STRIDE: tl.constexpr, TILE_GROUPS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Numbers of a tile of groups of a row, a group in each row of the tile; their columns, and which there are."""
    groups = tl.program_id(1) * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
    columns = tl.arange(0, TILE_COLUMNS)
    is_number = (groups < NUM_GROUPS)[:, None] & (columns < GROUP)[None, :]
    at = (groups * GROUP)[:, None] + columns[None, :]
    return tl.load(x + row * X_STRIDE + at, mask=is_number, other=0.0).to(tl.float32), at, is_number


@triton.jit
def mean_of_squares(values, GROUP: tl.constexpr, TILE_GROUPS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """The mean of GROUP columns in each row, [TILE_GROUPS]. Pairs of neighbours are added up first, then pairs of their
    sums: the order of a sum over a whole axis would follow from the layout of the kernel, but all norms must agree."""
    squares = values * values
    for halving in tl.static_range(MOST_HALVINGS):
        if TILE_COLUMNS >> halving > 1:
            squares = tl.sum(tl.reshape(squares, (TILE_GROUPS, TILE_COLUMNS >> (halving + 1), 2)), axis=2)
    return tl.reshape(squares, (TILE_GROUPS,)) / GROUP


@triton.jit
def rms_norm(
    x, weight, y,
    GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, EPS: tl.constexpr, X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr,
    TILE_GROUPS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """y = x / rms(x) * weight for each GROUP columns. Grid: rows, tiles of groups; TILE_COLUMNS is at least GROUP."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, TILE_COLUMNS)
    values, at, is_number = _groups(x, row, GROUP, NUM_GROUPS, X_STRIDE, TILE_GROUPS, TILE_COLUMNS)
    scale = 1.0 / tl.sqrt_rn(mean_of_squares(values, GROUP, TILE_GROUPS, TILE_COLUMNS) + EPS)
    weights = tl.load(weight + columns, mask=columns < GROUP, other=0.0)
    normalized = values * scale[:, None] * weights[None, :]
    tl.store(y + row * Y_STRIDE + at, normalized.to(y.dtype.element_ty), mask=is_number)


@triton.jit
def norm_by_columns(
    x, weight, bias, y,
    GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, EPS: tl.constexpr, IS_CENTERED: tl.constexpr,
    HAS_BIAS: tl.constexpr, X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, TILE_GROUPS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """`rms_norm` with a weight, and a bias, for each column of a row; of x - mean(x) where it IS_CENTERED."""
    row = tl.program_id(0).to(tl.int64)
    values, at, is_number = _groups(x, row, GROUP, NUM_GROUPS, X_STRIDE, TILE_GROUPS, TILE_COLUMNS)
    if IS_CENTERED:
        values = tl.where(is_number, values - (tl.sum(values, axis=1) / GROUP)[:, None], 0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, axis=1) / GROUP + EPS)
    normalized = values * scale[:, None] * tl.load(weight + at, mask=is_number, other=0.0)
    if HAS_BIAS:
        normalized += tl.load(bias + at, mask=is_number, other=0.0)
    tl.store(y + row * Y_STRIDE + at, normalized.to(y.dtype.element_ty), mask=is_number)


@triton.jit
def activation(
    x, y,
    WIDTH: tl.constexpr, X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, ACTIVATION: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """y = activation(x)"""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    values = tl.load(x + row * X_STRIDE + columns, mask=columns < WIDTH).to(tl.float32)
    tl.store(y + row * Y_STRIDE + columns, activate(values, ACTIVATION).to(y.dtype.element_ty), columns < WIDTH)


@triton.jit
def store_rounded(
    values, integers, scales, row, groups, at,
    Y_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Groups of a row, a group in each row of `values`: the largest of a group becomes 127."""
    peak = tl.max(tl.abs(values), axis=1)
    steps, scale = rounded(values, peak, 127.0)
    is_group = groups < GROUPS
    tl.store(integers + row * Y_STRIDE + at, steps.to(tl.int8), mask=is_group[:, None])
    tl.store(scales + row * SCALES_STRIDE + groups, scale, mask=is_group)
    tl.store(scales + row * SCALES_STRIDE + GROUPS + groups, tl.sum(steps, axis=1) * scale, mask=is_group)


@triton.jit
def rounded_rms_norm(
    x, weight, integers, scales,
    WIDTH: tl.constexpr, EPS: tl.constexpr, X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """`rms_norm` and `round_rows` in one, for rows of one group of which only integers are wanted. Grid: rows;
    TILE_GROUPS is at least GROUPS."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, TILE_GROUPS)
    at = (groups * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    values = tl.load(x + row * X_STRIDE + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(tl.sum(values * values, axis=1), axis=0) / WIDTH + EPS)
    values = values * scale * tl.load(weight + at, mask=at < WIDTH, other=0.0)
    store_rounded(values, integers, scales, row, groups, at, Y_STRIDE, SCALES_STRIDE, GROUPS)


@triton.jit
def round_rows(
    x, integers, scales,
    WIDTH: tl.constexpr, X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """x = integers * scales, nearly: the largest of a GROUP of columns becomes 127. Filled up with zeros to GROUPS
    groups; behind a row's scales are the sums of its groups, scaled. Grid: rows, tiles of groups."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
    at = (groups * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    values = tl.load(x + row * X_STRIDE + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    store_rounded(values, integers, scales, row, groups, at, Y_STRIDE, SCALES_STRIDE, GROUPS)


@triton.jit
def add(
    a, b, y,
    WIDTH: tl.constexpr, A_STRIDE: tl.constexpr, B_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    left = tl.load(a + row * A_STRIDE + columns, mask=columns < WIDTH).to(tl.float32)
    right = tl.load(b + row * B_STRIDE + columns, mask=columns < WIDTH).to(tl.float32)
    tl.store(y + row * Y_STRIDE + columns, (left + right).to(y.dtype.element_ty), mask=columns < WIDTH)


@triton.jit
def multiply(
    a, b, y,
    WIDTH: tl.constexpr, A_STRIDE: tl.constexpr, B_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    left = tl.load(a + row * A_STRIDE + columns, mask=columns < WIDTH).to(tl.float32)
    right = tl.load(b + row * B_STRIDE + columns, mask=columns < WIDTH).to(tl.float32)
    tl.store(y + row * Y_STRIDE + columns, (left * right).to(y.dtype.element_ty), mask=columns < WIDTH)


@triton.jit
def scale(
    x, weight, y,
    WIDTH: tl.constexpr, NUM_WEIGHTS: tl.constexpr, X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """y = weight * x; a row has a weight for each column, or one for all."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_column = columns < WIDTH
    values = tl.load(x + row * X_STRIDE + columns, mask=is_column, other=0.0).to(tl.float32)
    places = columns if NUM_WEIGHTS > 1 else columns * 0
    weights = tl.load(weight + places, mask=is_column, other=0.0)
    tl.store(y + row * Y_STRIDE + columns, (values * weights).to(y.dtype.element_ty), mask=is_column)


@triton.jit
def scale_by_position(
    x, positions, factors, y,
    WIDTH: tl.constexpr, X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """y[t] = factors[positions[t]] * x[t]"""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    values = tl.load(x + row * X_STRIDE + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    values = values * tl.load(factors + tl.load(positions + row))
    tl.store(y + row * Y_STRIDE + columns, values.to(y.dtype.element_ty), mask=columns < WIDTH)


@triton.jit
def sigmoid_gate(
    x, gate, y,
    WIDTH: tl.constexpr, GATE_WIDTH: tl.constexpr, SILU: tl.constexpr, X_STRIDE: tl.constexpr,
    GATE_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """y = sigmoid(gate) * x, or silu(gate) * x; a gate has a number for each column, or one for all."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_column = columns < WIDTH
    values = tl.load(x + row * X_STRIDE + columns, mask=is_column, other=0.0).to(tl.float32)
    places = columns if GATE_WIDTH > 1 else columns * 0
    gates = tl.load(gate + row * GATE_STRIDE + places, mask=is_column, other=0.0).to(tl.float32)
    gates = activate(gates, "silu") if SILU else sigmoid(gates)
    tl.store(y + row * Y_STRIDE + columns, (values * gates).to(y.dtype.element_ty), mask=is_column)


@triton.jit
def gated_activation(
    x, y,
    WIDTH: tl.constexpr, X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, ACTIVATION: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """y = activation(gate) * up, where a row of x has WIDTH columns of gate, then those of up."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    gate = tl.load(x + row * X_STRIDE + columns, mask=columns < WIDTH).to(tl.float32)
    up = tl.load(x + row * X_STRIDE + WIDTH + columns, mask=columns < WIDTH).to(tl.float32)
    tl.store(y + row * Y_STRIDE + columns, (activate(gate, ACTIVATION) * up).to(y.dtype.element_ty), columns < WIDTH)


@triton.jit
def select_rows(
    selected, x, y,
    WIDTH: tl.constexpr, X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """y[s] = x[selected[s]]"""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    source = tl.load(selected + row).to(tl.int64)
    values = tl.load(x + source * X_STRIDE + columns, mask=columns < WIDTH)
    tl.store(y + row * Y_STRIDE + columns, values, mask=columns < WIDTH)
