"""What Gemma 3n does to the streams of a token, and to its gates. Grid of all: rows; of those that are wide: and tiles
of columns."""

from __future__ import annotations

import triton
import triton.language as tl

from llmserve.engine.cuda.kernels.rowwise import token_of


@triton.jit
def embed_known(
    token_ids, chosen, table, y,
    NUM_ROWS: tl.constexpr, WIDTH: tl.constexpr, Y_STRIDE: tl.constexpr, SCALE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """`rowwise.embed` with a table of NUM_ROWS: tokens behind them have the first one's."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    token = token_of(token_ids, chosen, row)
    token = tl.where(token < NUM_ROWS, token, 0).to(tl.int64)
    values = tl.load(table + token * WIDTH + columns, mask=columns < WIDTH).to(tl.float32)
    tl.store(y + row * Y_STRIDE + columns, (values * SCALE).to(y.dtype.element_ty), mask=columns < WIDTH)


@triton.jit
def mix(
    x, z, coefficients, y,
    WIDTH: tl.constexpr, NUM_OTHERS: tl.constexpr, FIRST: tl.constexpr, OFFSET: tl.constexpr,
    HAS_COEFFICIENTS: tl.constexpr, X_STRIDE: tl.constexpr, Z_STRIDE: tl.constexpr, C_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """y[k] = x[k] + sum over j, in order, of (coefficients[k, j] + OFFSET) * z[j], for groups of WIDTH columns; those
    before FIRST stay. Grid: rows, tiles of columns of a group, groups."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(2)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_column = columns < WIDTH
    total = tl.load(x + row * X_STRIDE + group * WIDTH + columns, mask=is_column, other=0.0).to(tl.float32)
    if group >= FIRST:
        for other in tl.static_range(NUM_OTHERS):
            added = tl.load(z + row * Z_STRIDE + other * WIDTH + columns, mask=is_column, other=0.0).to(tl.float32)
            if HAS_COEFFICIENTS:
                factor = tl.load(coefficients + row * C_STRIDE + group * NUM_OTHERS + other).to(tl.float32) + OFFSET
                total += factor * added
            else:
                total += OFFSET * added
    tl.store(y + row * Y_STRIDE + group * WIDTH + columns, total.to(y.dtype.element_ty), mask=is_column)


@triton.jit
def spread(
    x, z, y,
    WIDTH: tl.constexpr, LEAST: tl.constexpr, X_STRIDE: tl.constexpr, Z_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """x, and beside it the groups of z, as large as x; LEAST: of the square of a group. Grid: rows, x and groups;
    TILE_COLUMNS is at least WIDTH."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, TILE_COLUMNS)
    is_column = columns < WIDTH
    values = tl.load(x + row * X_STRIDE + columns, mask=is_column, other=0.0).to(tl.float32)
    if group > 0:
        size = tl.sqrt_rn(tl.sum(values * values, axis=0) / WIDTH)
        values = tl.load(z + row * Z_STRIDE + (group - 1) * WIDTH + columns, mask=is_column, other=0.0).to(tl.float32)
        own_size = tl.sqrt_rn(tl.maximum(tl.sum(values * values, axis=0) / WIDTH, LEAST))
        values = values * (size / own_size)
    tl.store(y + row * Y_STRIDE + group * WIDTH + columns, values.to(y.dtype.element_ty), mask=is_column)


@triton.jit
def over_threshold(
    x, y,
    WIDTH: tl.constexpr, DEVIATIONS: tl.constexpr, X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """y = max(0, x - mean - DEVIATIONS * standard deviation). TILE_COLUMNS is at least WIDTH."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, TILE_COLUMNS)
    is_column = columns < WIDTH
    values = tl.load(x + row * X_STRIDE + columns, mask=is_column, other=0.0).to(tl.float32)
    values = tl.where(is_column, values - tl.sum(values, axis=0) / WIDTH, 0.0)
    deviation = tl.sqrt_rn(tl.sum(values * values, axis=0) / WIDTH)
    passed = tl.maximum(values - DEVIATIONS * deviation, 0.0)
    tl.store(y + row * Y_STRIDE + columns, passed.to(y.dtype.element_ty), mask=is_column)
