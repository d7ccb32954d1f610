"""Attention over a cache of integers, as the CPU engine's: both products are of bytes, their sums exact.

Queries and keys have a scale for every QUANTIZED_GROUP dimensions of a head, values one for each token and head. What a
query takes of the values, its weights times their scales, becomes integers of 14 bits in two digits of seven, with one
scale for each tile of positions. The CPU's chunks are of 256 positions, these of TILE_KEYS, which are fewer: scores of
256 at once have no room in registers. So what a weight loses is at most what it loses there.

A cache has, for each block of positions and head, keys [BLOCK_SIZE, HEAD_DIM] and behind them, from `key_scales` on,
their scales [groups, BLOCK_SIZE]; values [HEAD_DIM, BLOCK_SIZE], since products of bytes want next to each other what
is summed up, and behind them, from `value_scales` on, a scale for each position. KEY_STRIDE and VALUE_STRIDE are what
all that takes, in bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmserve.engine.cuda.kernels.rope import turned
from llmserve.engine.cuda.kernels.rounding import rounded
from llmserve.engine.cuda.kernels.softmax import weights_of

QUANTIZED_GROUP: tl.constexpr = tl.constexpr(32)  # `INT8_CACHE.group`
MOST_SHARES: tl.constexpr = tl.constexpr(16383.0)  # 128 * 127 + 127


@triton.jit
def _rounded_heads(values, TILE_HEADS: tl.constexpr, TILE_DIM: tl.constexpr):
    """Integers [TILE_HEADS, TILE_DIM], and scales [TILE_HEADS, TILE_DIM // QUANTIZED_GROUP]."""
    groups = tl.reshape(values, (TILE_HEADS, TILE_DIM // QUANTIZED_GROUP, QUANTIZED_GROUP))
    steps, scales = rounded(groups, tl.max(tl.abs(groups), axis=2), 127.0)
    return tl.reshape(steps, (TILE_HEADS, TILE_DIM)).to(tl.int8), scales


@triton.jit
def round_queries(
    q, positions, cos, sin, integers, scales,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, NUM_HEADS: tl.constexpr, Q_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr, SCALE: tl.constexpr, TILE_HEADS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Queries, turned, as integers, each head filled up with zeros to whole groups; scales take what scores are
    multiplied with. Grid: rows, tiles of query heads."""
    GROUPS: tl.constexpr = (HEAD_DIM + QUANTIZED_GROUP - 1) // QUANTIZED_GROUP
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    columns, groups = tl.arange(0, TILE_DIM), tl.arange(0, TILE_DIM // QUANTIZED_GROUP)
    is_head = (heads < NUM_HEADS)[:, None]
    place = tl.load(positions + row).to(tl.int64) * (ROTARY_DIM // 2)
    is_number = is_head & (columns < HEAD_DIM)[None, :]
    values = turned(q + row * Q_STRIDE, cos + place, sin + place, heads, columns, is_number, HEAD_DIM, ROTARY_DIM)
    steps, of_groups = _rounded_heads(values, TILE_HEADS, TILE_DIM)
    at = integers + row * Y_STRIDE + (heads * (GROUPS * QUANTIZED_GROUP))[:, None] + columns[None, :]
    tl.store(at, steps, mask=is_head & (columns < GROUPS * QUANTIZED_GROUP)[None, :])
    scales_at = scales + row * SCALES_STRIDE + (heads * GROUPS)[:, None] + groups[None, :]
    tl.store(scales_at, of_groups * SCALE, mask=is_head & (groups < GROUPS)[None, :])


@triton.jit
def write_cache(
    k, v, positions, slots, cos, sin, keys, key_scales, values, value_scales,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr,
    TILE_HEADS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """As `attention.write_cache`, rounded."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
        columns, groups = tl.arange(0, TILE_DIM), tl.arange(0, TILE_DIM // QUANTIZED_GROUP)
        is_head = heads < NUM_KV_HEADS
        is_number = is_head[:, None] & (columns < HEAD_DIM)[None, :]
        turn = tl.load(positions + row).to(tl.int64) * (ROTARY_DIM // 2)
        key = turned(k + row * K_STRIDE, cos + turn, sin + turn, heads, columns, is_number, HEAD_DIM, ROTARY_DIM)
        steps, of_groups = _rounded_heads(key, TILE_HEADS, TILE_DIM)
        of_block, place = slot // BLOCK_SIZE * NUM_KV_HEADS + heads, slot % BLOCK_SIZE
        at = keys + (of_block * KEY_STRIDE + place * HEAD_DIM)[:, None] + columns[None, :]
        tl.store(at, steps, mask=is_number)
        scales_at = key_scales + (of_block * (KEY_STRIDE // 4) + place)[:, None] + (groups * BLOCK_SIZE)[None, :]
        tl.store(scales_at, of_groups, mask=is_head[:, None] & (groups * QUANTIZED_GROUP < HEAD_DIM)[None, :])
        value = tl.load(v + row * V_STRIDE + (heads * HEAD_DIM)[:, None] + columns[None, :], mask=is_number, other=0.0)
        value = value.to(tl.float32)
        steps, of_heads = rounded(value, tl.max(tl.abs(value), axis=1), 127.0)
        at = values + (of_block * VALUE_STRIDE + place)[:, None] + (columns * BLOCK_SIZE)[None, :]
        tl.store(at, steps.to(tl.int8), mask=is_number)
        tl.store(value_scales + of_block * (VALUE_STRIDE // 4) + place, of_heads, mask=is_head)


@triton.jit
def rounded_queries(
    q, scales, rows, heads, is_row,
    HEAD_DIM: tl.constexpr, Q_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr,
):  # fmt: skip
    """Of each group of dimensions: integers of the rows, and their scales."""
    GROUPS: tl.constexpr = (HEAD_DIM + QUANTIZED_GROUP - 1) // QUANTIZED_GROUP
    wide_rows = rows.to(tl.int64)
    dims = tl.arange(0, QUANTIZED_GROUP)
    begins = q + (wide_rows * Q_STRIDE + heads * (GROUPS * QUANTIZED_GROUP))[:, None] + dims[None, :]
    scales_at = scales + wide_rows * SCALES_STRIDE + heads * GROUPS
    integers = ()
    of_groups = ()
    for group in tl.static_range(GROUPS):
        integer = tl.load(begins + group * QUANTIZED_GROUP, mask=is_row[:, None], other=0)
        integers = integers + (integer,)
        of_groups = of_groups + (tl.load(scales_at + group, mask=is_row, other=0.0),)
    return integers, of_groups


@triton.jit
def run_of_integers(
    queries, query_scales, keys, key_scales, values, value_scales, blocks, slopes, query_positions, begin, end,
    kv_head, columns,
    HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr, HAS_ALIBI: tl.constexpr,
    TILE_QUERIES: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Peaks, sums and weighted values of the positions [begin, end), from nothing. `begin` begins a block of keys.

    Integers are loaded in whole blocks, for neighbours are loaded at once only where one condition holds for all of
    them; those of positions that are not there are multiplied with shares of nothing.
    """
    dims = tl.arange(0, QUANTIZED_GROUP)
    num_blocks = (end + BLOCK_SIZE - 1) // BLOCK_SIZE
    peak = tl.full((TILE_QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_QUERIES,), tl.float32)
    taken = tl.zeros((TILE_QUERIES, TILE_DIM), tl.float32)
    for first in range(begin, end, TILE_KEYS):
        positions = first + tl.arange(0, TILE_KEYS)
        is_there, is_block = positions < end, positions // BLOCK_SIZE < num_blocks
        block = tl.load(blocks + positions // BLOCK_SIZE, mask=is_block, other=0).to(tl.int64)
        of_block, place = block * NUM_KV_HEADS + kv_head, positions % BLOCK_SIZE
        key_at = keys + (of_block * KEY_STRIDE + place * HEAD_DIM)[:, None] + dims[None, :]
        key_scales_at = key_scales + of_block * (KEY_STRIDE // 4) + place
        scores = tl.zeros((TILE_QUERIES, TILE_KEYS), tl.float32)
        for group in tl.static_range((HEAD_DIM + QUANTIZED_GROUP - 1) // QUANTIZED_GROUP):
            is_number = is_block[:, None] & (dims + group * QUANTIZED_GROUP < HEAD_DIM)[None, :]
            key = tl.load(key_at + group * QUANTIZED_GROUP, mask=is_number, other=0)
            scales = tl.load(key_scales_at + group * BLOCK_SIZE, mask=is_there, other=0.0)
            exact = tl.dot(queries[group], tl.trans(key), out_dtype=tl.int32)
            scores += exact.to(tl.float32) * (query_scales[group][:, None] * scales[None, :])
        weights, peak, share = weights_of(
            scores, peak, positions, query_positions, slopes, is_there, SOFT_CAP, WINDOW, HAS_ALIBI
        )
        total = total * share + tl.sum(weights, axis=1)
        scales = tl.load(value_scales + of_block * (VALUE_STRIDE // 4) + place, mask=is_there, other=0.0)
        shares = weights * scales[None, :]
        steps, of_shares = rounded(shares, tl.max(shares, axis=1), MOST_SHARES)
        integers = steps.to(tl.int32)
        value_at = values + (of_block * VALUE_STRIDE + place)[None, :] + (columns * BLOCK_SIZE)[:, None]
        value = tl.load(value_at, mask=is_block[None, :] & (columns < HEAD_DIM)[:, None], other=0)
        exact = tl.dot((integers >> 7).to(tl.int8), tl.trans(value), out_dtype=tl.int32) * 128
        exact = tl.dot((integers & 127).to(tl.int8), tl.trans(value), exact, out_dtype=tl.int32)
        taken = taken * share[:, None] + exact.to(tl.float32) * of_shares[:, None]
    return peak, total, taken
