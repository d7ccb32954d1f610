"""Causal attention over a paged cache, and what goes into the cache.

A tile is TILE_QUERIES rows of one product: some tokens of one sequence, each with the query heads that share a key
and value head. Keys are met in blocks of TILE_KEYS; SEGMENT positions form a run that starts from nothing, and runs are
merged in order. `attention` does all of it, `attention_segments` a run in each program, for few tokens with long pasts,
and `merge_segments` the rest: the same operations, so a token has the same bits whichever runs.

A cache has, for each block of positions and head, [BLOCK_SIZE, HEAD_DIM] numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmserve.engine.cuda.kernels.activations import soft_capped


@triton.jit
def _turned(x, cos, sin, heads, columns, is_number, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr):
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


@triton.jit
def turn_queries(
    q, positions, cos, sin, y,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, NUM_HEADS: tl.constexpr, Q_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Grid: rows, tiles of query heads. `cos` and `sin` have ROTARY_DIM / 2 numbers for each position."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    columns = tl.arange(0, TILE_DIM)
    is_number = (heads < NUM_HEADS)[:, None] & (columns < HEAD_DIM)[None, :]
    place = tl.load(positions + row).to(tl.int64) * (ROTARY_DIM // 2)
    values = _turned(q + row * Q_STRIDE, cos + place, sin + place, heads, columns, is_number, HEAD_DIM, ROTARY_DIM)
    at = y + row * Y_STRIDE + (heads * HEAD_DIM)[:, None] + columns[None, :]
    tl.store(at, values.to(y.dtype.element_ty), mask=is_number)


@triton.jit
def write_cache(
    k, v, positions, slots, cos, sin, keys, values,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Keys, turned, and values into the cache of a layer. Grid: rows, tiles of key and value heads.

    slots: block * BLOCK_SIZE + place in it; negative for a row that stands for none.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
        columns = tl.arange(0, TILE_DIM)
        is_number = (heads < NUM_KV_HEADS)[:, None] & (columns < HEAD_DIM)[None, :]
        place = tl.load(positions + row).to(tl.int64) * (ROTARY_DIM // 2)
        key = _turned(k + row * K_STRIDE, cos + place, sin + place, heads, columns, is_number, HEAD_DIM, ROTARY_DIM)
        value = tl.load(v + row * V_STRIDE + (heads * HEAD_DIM)[:, None] + columns[None, :], mask=is_number)
        places = ((slot // BLOCK_SIZE * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
        at = places[:, None] + columns[None, :]
        tl.store(keys + at, key.to(keys.dtype.element_ty), mask=is_number)
        tl.store(values + at, value.to(values.dtype.element_ty), mask=is_number)


@triton.jit
def _tile(tiles, GROUP: tl.constexpr, TILE_QUERIES: tl.constexpr):
    """Of the tile of this program: its first row, sequence, first position, number of tokens, and for each of its rows
    the token in it, the head in the group, and whether there is one."""
    at = tiles + tl.program_id(0) * 4
    first_row, num_tokens = tl.load(at), tl.load(at + 1)
    sequence, start = tl.load(at + 2), tl.load(at + 3)
    number = tl.arange(0, TILE_QUERIES)
    tokens = number // GROUP
    return first_row, num_tokens, sequence, start, tokens, number % GROUP, tokens < num_tokens


@triton.jit
def _run(
    q, keys, values, blocks, slopes, query_positions, begin, end, kv_head, columns,
    HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr, HAS_ALIBI: tl.constexpr, TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Peaks, sums and weighted values of the positions [begin, end), from nothing. `begin` begins a block of keys."""
    peak = tl.full((TILE_QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_QUERIES,), tl.float32)
    taken = tl.zeros((TILE_QUERIES, TILE_DIM), tl.float32)
    for first in range(begin, end, TILE_KEYS):
        positions = first + tl.arange(0, TILE_KEYS)
        is_there = positions < end
        block = tl.load(blocks + positions // BLOCK_SIZE, mask=is_there, other=0).to(tl.int64)
        at = ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + positions % BLOCK_SIZE) * HEAD_DIM
        is_number = is_there[:, None] & (columns < HEAD_DIM)[None, :]
        key = tl.load(keys + at[:, None] + columns[None, :], mask=is_number, other=0.0)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * SCALE
        if SOFT_CAP != 0.0:
            scores = soft_capped(scores, SOFT_CAP)
        distance = positions[None, :] - query_positions[:, None]
        if HAS_ALIBI:
            scores += slopes[:, None] * distance.to(tl.float32)
        is_seen = (distance <= 0) & is_there[None, :]
        if WINDOW > 0:
            is_seen = is_seen & (distance > -WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp(scores - base[:, None])
        share = tl.exp(peak - base)
        total = total * share + tl.sum(weights, axis=1)
        value = tl.load(values + at[:, None] + columns[None, :], mask=is_number, other=0.0)
        taken = taken * share[:, None]
        taken = tl.dot(weights.to(value.dtype), value, taken, input_precision="ieee")
        peak = new_peak
    return peak, total, taken


@triton.jit
def _merged(peak, total, taken, next_peak, next_total, next_taken):
    """Two runs as one."""
    both = tl.maximum(peak, next_peak)
    base = tl.where(both == float("-inf"), 0.0, both)
    first, second = tl.exp(peak - base), tl.exp(next_peak - base)
    return both, total * first + next_total * second, taken * first[:, None] + next_taken * second[:, None]


@triton.jit
def _queries(q, rows, heads, columns, is_row, Q_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr):
    at = q + rows[:, None].to(tl.int64) * Q_STRIDE + (heads * HEAD_DIM)[:, None] + columns[None, :]
    return tl.load(at, mask=is_row[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def attention(
    q, keys, values, tiles, block_tables, alibi_slopes, y,
    HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr,
    HAS_ALIBI: tl.constexpr, Q_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, SEGMENT: tl.constexpr,
    TILE_QUERIES: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Grid: tiles, key and value heads."""
    kv_head = tl.program_id(1)
    first_row, num_tokens, sequence, start, tokens, head_of_group, is_row = _tile(tiles, GROUP, TILE_QUERIES)
    if num_tokens > 0:
        rows, heads = first_row + tokens, kv_head * GROUP + head_of_group
        columns = tl.arange(0, TILE_DIM)
        queries = _queries(q, rows, heads, columns, is_row, Q_STRIDE, HEAD_DIM)
        slopes = tl.zeros((TILE_QUERIES,), tl.float32)
        if HAS_ALIBI:
            slopes = tl.load(alibi_slopes + heads)
        end = start + num_tokens
        segment = 0
        if WINDOW > 0:
            segment = tl.maximum(start - WINDOW + 1, 0) // SEGMENT
        peak = tl.full((TILE_QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((TILE_QUERIES,), tl.float32)
        taken = tl.zeros((TILE_QUERIES, TILE_DIM), tl.float32)
        for begin in range(segment * SEGMENT, end, SEGMENT):
            next_peak, next_total, next_taken = _run(
                queries, keys, values, block_tables + sequence * MAX_BLOCKS, slopes, start + tokens,
                begin, tl.minimum(begin + SEGMENT, end), kv_head, columns,
                HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE, SCALE, SOFT_CAP, WINDOW, HAS_ALIBI, TILE_QUERIES, TILE_KEYS,
                TILE_DIM,
            )  # fmt: skip
            peak, total, taken = _merged(peak, total, taken, next_peak, next_total, next_taken)
        at = y + rows[:, None].to(tl.int64) * Y_STRIDE + (heads * HEAD_DIM)[:, None] + columns[None, :]
        is_number = is_row[:, None] & (columns < HEAD_DIM)[None, :]
        tl.store(at, (taken / total[:, None]).to(y.dtype.element_ty), mask=is_number)


@triton.jit
def attention_segments(
    q, keys, values, tiles, block_tables, alibi_slopes, peaks, totals, parts,
    HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr,
    HAS_ALIBI: tl.constexpr, Q_STRIDE: tl.constexpr, MAX_ROWS: tl.constexpr, SEGMENT: tl.constexpr,
    TILE_QUERIES: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """peaks, totals [segments, MAX_ROWS, heads] and parts [segments, MAX_ROWS, heads, HEAD_DIM] of the segments that a
    tile sees. Grid: tiles, key and value heads, segments."""
    kv_head, segment = tl.program_id(1), tl.program_id(2)
    first_row, num_tokens, sequence, start, tokens, head_of_group, is_row = _tile(tiles, GROUP, TILE_QUERIES)
    begin, end = segment * SEGMENT, start + num_tokens
    is_seen = (num_tokens > 0) & (begin < end)
    if WINDOW > 0:
        is_seen = is_seen & (begin + SEGMENT > start - WINDOW + 1)
    if is_seen:
        rows, heads = first_row + tokens, kv_head * GROUP + head_of_group
        columns = tl.arange(0, TILE_DIM)
        queries = _queries(q, rows, heads, columns, is_row, Q_STRIDE, HEAD_DIM)
        slopes = tl.zeros((TILE_QUERIES,), tl.float32)
        if HAS_ALIBI:
            slopes = tl.load(alibi_slopes + heads)
        peak, total, taken = _run(
            queries, keys, values, block_tables + sequence * MAX_BLOCKS, slopes, start + tokens,
            begin, tl.minimum(begin + SEGMENT, end), kv_head, columns,
            HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE, SCALE, SOFT_CAP, WINDOW, HAS_ALIBI, TILE_QUERIES, TILE_KEYS, TILE_DIM,
        )  # fmt: skip
        places = (segment * MAX_ROWS + rows).to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
        tl.store(peaks + places, peak, mask=is_row)
        tl.store(totals + places, total, mask=is_row)
        is_number = is_row[:, None] & (columns < HEAD_DIM)[None, :]
        tl.store(parts + places[:, None] * HEAD_DIM + columns[None, :], taken, mask=is_number)


@triton.jit
def merge_segments(
    positions, slots, peaks, totals, parts, y,
    HEAD_DIM: tl.constexpr, NUM_HEADS: tl.constexpr, WINDOW: tl.constexpr, Y_STRIDE: tl.constexpr,
    MAX_ROWS: tl.constexpr, SEGMENT: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """What `attention` does behind its runs. Grid: rows, tiles of query heads."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(slots + row) >= 0:
        heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
        columns = tl.arange(0, TILE_DIM)
        is_head = heads < NUM_HEADS
        is_number = is_head[:, None] & (columns < HEAD_DIM)[None, :]
        position = tl.load(positions + row)
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(position - WINDOW + 1, 0) // SEGMENT
        peak = tl.full((TILE_HEADS,), float("-inf"), tl.float32)
        total = tl.zeros((TILE_HEADS,), tl.float32)
        taken = tl.zeros((TILE_HEADS, TILE_DIM), tl.float32)
        for segment in range(begin, position // SEGMENT + 1):
            places = (segment * MAX_ROWS + row) * NUM_HEADS + heads
            next_peak = tl.load(peaks + places, mask=is_head, other=0.0)
            next_total = tl.load(totals + places, mask=is_head, other=1.0)
            part = tl.load(parts + (places * HEAD_DIM)[:, None] + columns[None, :], mask=is_number, other=0.0)
            peak, total, taken = _merged(peak, total, taken, next_peak, next_total, part)
        at = y + row * Y_STRIDE + (heads * HEAD_DIM)[:, None] + columns[None, :]
        tl.store(at, (taken / total[:, None]).to(y.dtype.element_ty), mask=is_number)
