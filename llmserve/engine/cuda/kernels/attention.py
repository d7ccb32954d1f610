"""Causal attention over a paged cache, and what goes into the cache.

A tile is TILE_QUERIES rows of one product: some tokens of one sequence, each with the query heads that share a key
and value head. Keys are met in blocks of TILE_KEYS; SEGMENT positions form a run that starts from nothing, and runs are
merged in order. `attention` does all of it, `attention_segments` a run in each program, for few tokens with long pasts,
and `merge_segments` the rest: the same operations, so a token has the same bits whichever runs.

FORMAT says what queries and cache are kept in: "float", where a cache has, for each block of positions and head,
[BLOCK_SIZE, HEAD_DIM] numbers, or "int8", which is `attention_int8.py`'s. Scales that a format has not are any address.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmserve.engine.cuda.inputs import TILE
from llmserve.engine.cuda.kernels.attention_int8 import rounded_queries, run_of_integers
from llmserve.engine.cuda.kernels.rope import turned
from llmserve.engine.cuda.kernels.rowwise import store_rounded
from llmserve.engine.cuda.kernels.softmax import merged, weights_of
from llmserve.engine.native.records import num_words, word_of

TILE_WORDS: tl.constexpr = tl.constexpr(num_words(TILE))
FIRST_ROW: tl.constexpr = tl.constexpr(word_of(TILE, "first_row"))
NUM_TOKENS: tl.constexpr = tl.constexpr(word_of(TILE, "num_tokens"))
SEQUENCE: tl.constexpr = tl.constexpr(word_of(TILE, "sequence"))
START: tl.constexpr = tl.constexpr(word_of(TILE, "start"))


@triton.jit
def _turn_row(
    q, positions, cos, sin, y, row, first_head,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, NUM_HEADS: tl.constexpr, Q_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    heads, columns = first_head + tl.arange(0, TILE_HEADS), tl.arange(0, TILE_DIM)
    is_number = (heads < NUM_HEADS)[:, None] & (columns < HEAD_DIM)[None, :]
    place = tl.load(positions + row).to(tl.int64) * (ROTARY_DIM // 2)
    values = turned(q + row * Q_STRIDE, cos + place, sin + place, heads, columns, is_number, HEAD_DIM, ROTARY_DIM)
    at = y + row * Y_STRIDE + (heads * HEAD_DIM)[:, None] + columns[None, :]
    tl.store(at, values.to(y.dtype.element_ty), mask=is_number)


@triton.jit
def turn(
    q, positions, cos, sin, y,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, NUM_HEADS: tl.constexpr, Q_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Of heads that something else than attention reads. Grid: rows, tiles of heads."""
    _turn_row(
        q, positions, cos, sin, y, tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE_HEADS,
        HEAD_DIM, ROTARY_DIM, NUM_HEADS, Q_STRIDE, Y_STRIDE, TILE_HEADS, TILE_DIM,
    )  # fmt: skip


@triton.jit
def _write_row(
    k, v, positions, slots, cos, sin, keys, values, row, first_head,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        heads, columns = first_head + tl.arange(0, TILE_HEADS), tl.arange(0, TILE_DIM)
        is_number = (heads < NUM_KV_HEADS)[:, None] & (columns < HEAD_DIM)[None, :]
        place = tl.load(positions + row).to(tl.int64) * (ROTARY_DIM // 2)
        key = turned(k + row * K_STRIDE, cos + place, sin + place, heads, columns, is_number, HEAD_DIM, ROTARY_DIM)
        value = tl.load(v + row * V_STRIDE + (heads * HEAD_DIM)[:, None] + columns[None, :], mask=is_number)
        places = ((slot // BLOCK_SIZE * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
        at = places[:, None] + columns[None, :]
        tl.store(keys + at, key.to(keys.dtype.element_ty), mask=is_number)
        tl.store(values + at, value.to(values.dtype.element_ty), mask=is_number)


@triton.jit
def write_cache(
    k, v, positions, slots, cos, sin, keys, values,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Keys, turned, and values into the cache of a layer. Grid: rows, tiles of key and value heads.

    slots: block * BLOCK_SIZE + place in it; negative for a row that stands for none.
    """
    _write_row(
        k, v, positions, slots, cos, sin, keys, values, tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE_HEADS,
        HEAD_DIM, ROTARY_DIM, NUM_KV_HEADS, BLOCK_SIZE, K_STRIDE, V_STRIDE, TILE_HEADS, TILE_DIM,
    )  # fmt: skip


@triton.jit
def turn_and_write(
    q, k, v, positions, slots, cos, sin, y, keys, values,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Queries turned, and `write_cache`, which turns keys alike. Grid: rows, tiles of query heads, then of the others.

    `cos` and `sin` have ROTARY_DIM / 2 numbers for each position.
    """
    QUERY_TILES: tl.constexpr = (NUM_HEADS + TILE_HEADS - 1) // TILE_HEADS
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tile < QUERY_TILES:
        _turn_row(
            q, positions, cos, sin, y, row, tile * TILE_HEADS,
            HEAD_DIM, ROTARY_DIM, NUM_HEADS, Q_STRIDE, Y_STRIDE, TILE_HEADS, TILE_DIM,
        )  # fmt: skip
    else:
        _write_row(
            k, v, positions, slots, cos, sin, keys, values, row, (tile - QUERY_TILES) * TILE_HEADS,
            HEAD_DIM, ROTARY_DIM, NUM_KV_HEADS, BLOCK_SIZE, K_STRIDE, V_STRIDE, TILE_HEADS, TILE_DIM,
        )  # fmt: skip


@triton.jit
def _tile(tiles, GROUP: tl.constexpr, TILE_QUERIES: tl.constexpr):
    """Of the tile of this program: its first row, sequence, first position, number of tokens, and for each of its rows
    the token in it, the head in the group, and whether there is one."""
    at = tiles + tl.program_id(0) * TILE_WORDS
    first_row, num_tokens = tl.load(at + FIRST_ROW), tl.load(at + NUM_TOKENS)
    sequence, start = tl.load(at + SEQUENCE), tl.load(at + START)
    number = tl.arange(0, TILE_QUERIES)
    tokens = number // GROUP
    return first_row, num_tokens, sequence, start, tokens, number % GROUP, tokens < num_tokens


@triton.jit
def _run_of_floats(
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
        weights, peak, share = weights_of(
            scores, peak, positions, query_positions, slopes, is_there, SOFT_CAP, WINDOW, HAS_ALIBI
        )
        total = total * share + tl.sum(weights, axis=1)
        value = tl.load(values + at[:, None] + columns[None, :], mask=is_number, other=0.0)
        taken = taken * share[:, None]
        taken = tl.dot(weights.to(value.dtype), value, taken, input_precision="ieee")
    return peak, total, taken


@triton.jit
def _queries(
    q, scales, rows, heads, columns, is_row,
    FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr, Q_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr,
):  # fmt: skip
    """And their scales, where they have some."""
    if FORMAT == "int8":
        return rounded_queries(q, scales, rows, heads, is_row, HEAD_DIM, Q_STRIDE, SCALES_STRIDE)
    else:
        at = q + rows[:, None].to(tl.int64) * Q_STRIDE + (heads * HEAD_DIM)[:, None] + columns[None, :]
        return tl.load(at, mask=is_row[:, None] & (columns < HEAD_DIM)[None, :], other=0.0), 0


@triton.jit
def _run(
    queries, query_scales, keys, key_scales, values, value_scales, blocks, slopes, query_positions, begin, end,
    kv_head, columns,
    FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr, HAS_ALIBI: tl.constexpr, TILE_QUERIES: tl.constexpr, TILE_KEYS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):  # fmt: skip
    if FORMAT == "int8":
        return run_of_integers(
            queries, query_scales, keys, key_scales, values, value_scales, blocks, slopes, query_positions, begin, end,
            kv_head, columns,
            HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE, KEY_STRIDE, VALUE_STRIDE, SOFT_CAP, WINDOW, HAS_ALIBI, TILE_QUERIES,
            TILE_KEYS, TILE_DIM,
        )  # fmt: skip
    else:
        return _run_of_floats(
            queries, keys, values, blocks, slopes, query_positions, begin, end, kv_head, columns,
            HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE, SCALE, SOFT_CAP, WINDOW, HAS_ALIBI, TILE_QUERIES, TILE_KEYS, TILE_DIM,
        )  # fmt: skip


@triton.jit
def attention(
    q, q_scales, keys, key_scales, values, value_scales, tiles, block_tables, alibi_slopes, y,
    FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr,
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
        queries, scales = _queries(q, q_scales, rows, heads, columns, is_row, FORMAT, HEAD_DIM, Q_STRIDE, SCALES_STRIDE)
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
                queries, scales, keys, key_scales, values, value_scales, block_tables + sequence * MAX_BLOCKS, slopes,
                start + tokens, begin, tl.minimum(begin + SEGMENT, end), kv_head, columns,
                FORMAT, HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE, KEY_STRIDE, VALUE_STRIDE, SCALE, SOFT_CAP, WINDOW,
                HAS_ALIBI, TILE_QUERIES, TILE_KEYS, TILE_DIM,
            )  # fmt: skip
            peak, total, taken = merged(peak, total, taken, next_peak, next_total, next_taken)
        at = y + rows[:, None].to(tl.int64) * Y_STRIDE + (heads * HEAD_DIM)[:, None] + columns[None, :]
        is_number = is_row[:, None] & (columns < HEAD_DIM)[None, :]
        tl.store(at, (taken / total[:, None]).to(y.dtype.element_ty), mask=is_number)


@triton.jit
def attention_segments(
    q, q_scales, keys, key_scales, values, value_scales, tiles, block_tables, alibi_slopes, peaks, totals, parts,
    FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr,
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
        queries, scales = _queries(q, q_scales, rows, heads, columns, is_row, FORMAT, HEAD_DIM, Q_STRIDE, SCALES_STRIDE)
        slopes = tl.zeros((TILE_QUERIES,), tl.float32)
        if HAS_ALIBI:
            slopes = tl.load(alibi_slopes + heads)
        peak, total, taken = _run(
            queries, scales, keys, key_scales, values, value_scales, block_tables + sequence * MAX_BLOCKS, slopes,
            start + tokens, begin, tl.minimum(begin + SEGMENT, end), kv_head, columns,
            FORMAT, HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE, KEY_STRIDE, VALUE_STRIDE, SCALE, SOFT_CAP, WINDOW,
            HAS_ALIBI, TILE_QUERIES, TILE_KEYS, TILE_DIM,
        )  # fmt: skip
        places = (segment * MAX_ROWS + rows).to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
        tl.store(peaks + places, peak, mask=is_row)
        tl.store(totals + places, total, mask=is_row)
        is_number = is_row[:, None] & (columns < HEAD_DIM)[None, :]
        tl.store(parts + places[:, None] * HEAD_DIM + columns[None, :], taken, mask=is_number)


@triton.jit
def _merged_row(
    peaks, totals, parts, row, position, heads, columns,
    HEAD_DIM: tl.constexpr, NUM_HEADS: tl.constexpr, WINDOW: tl.constexpr, MAX_ROWS: tl.constexpr,
    SEGMENT: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """What `attention` does behind its runs, for heads of a row."""
    is_head = heads < NUM_HEADS
    is_number = is_head[:, None] & (columns < HEAD_DIM)[None, :]
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
        peak, total, taken = merged(peak, total, taken, next_peak, next_total, part)
    return taken / total[:, None]


@triton.jit
def merge_segments(
    positions, slots, peaks, totals, parts, y,
    HEAD_DIM: tl.constexpr, NUM_HEADS: tl.constexpr, WINDOW: tl.constexpr, Y_STRIDE: tl.constexpr,
    MAX_ROWS: tl.constexpr, SEGMENT: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Grid: rows, tiles of query heads."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(slots + row) >= 0:
        heads, columns = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS), tl.arange(0, TILE_DIM)
        found = _merged_row(
            peaks, totals, parts, row, tl.load(positions + row), heads, columns,
            HEAD_DIM, NUM_HEADS, WINDOW, MAX_ROWS, SEGMENT, TILE_HEADS, TILE_DIM,
        )  # fmt: skip
        at = y + row * Y_STRIDE + (heads * HEAD_DIM)[:, None] + columns[None, :]
        tl.store(at, found.to(y.dtype.element_ty), mask=(heads < NUM_HEADS)[:, None] & (columns < HEAD_DIM)[None, :])


@triton.jit
def merge_and_round(
    positions, slots, peaks, totals, parts, integers, scales,
    HEAD_DIM: tl.constexpr, NUM_HEADS: tl.constexpr, WINDOW: tl.constexpr, Y_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, MAX_ROWS: tl.constexpr,
    SEGMENT: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """`merge_segments` and `rowwise.round_rows` in one, where only integers are wanted: heads are a power of two wide,
    and whole groups. Grid: rows, tiles of query heads."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(slots + row) >= 0:
        OF_HEAD: tl.constexpr = HEAD_DIM // GROUP  # groups
        first = tl.program_id(1) * TILE_HEADS
        found = _merged_row(
            peaks, totals, parts, row, tl.load(positions + row), first + tl.arange(0, TILE_HEADS),
            tl.arange(0, TILE_DIM), HEAD_DIM, NUM_HEADS, WINDOW, MAX_ROWS, SEGMENT, TILE_HEADS, TILE_DIM,
        )  # fmt: skip
        groups = first * OF_HEAD + tl.arange(0, TILE_HEADS * OF_HEAD)
        at = (groups * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
        # heads beyond the last have no numbers; what fills the groups up has zeros
        values = tl.where(at < NUM_HEADS * HEAD_DIM, tl.reshape(found, (TILE_HEADS * OF_HEAD, GROUP)), 0.0)
        store_rounded(values, integers, scales, row, groups, at, Y_STRIDE, SCALES_STRIDE, GROUPS)
