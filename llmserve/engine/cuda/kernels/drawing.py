"""Draws of tokens: what top-k, top-p and min-p leave of a row of logits, and one of those by chance.

See `choosing.py` for records and samples. Values are logits over the temperature, the largest 0; a key is the bits of a
value without its sign, so that the larger key is the smaller value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmserve.engine.cuda.kernels.choosing import (
    BLOCK,
    MIN_P,
    NONE,
    POSITION,
    SEED,
    STREAM,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WORDS,
    cleaned,
    float_of,
)

FEW_BLOCKS: tl.constexpr = tl.constexpr(64)  # those with the largest peaks, which mostly decide
UNDECIDED: tl.constexpr = tl.constexpr(-1)
NEVER: tl.constexpr = tl.constexpr(0x7F800000)  # the key of minus infinity
KEY_BITS: tl.constexpr = tl.constexpr(31)


@triton.jit
def _key(values):
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _is_drawn(record, peak):
    return (peak > float("-inf")) & (float_of(record, TEMPERATURE) != 0.0) & (tl.load(record + TOP_K) != 1)


@triton.jit
def _exp(x):
    """`simd.h: exp_same`: rounded in the same places."""
    x = tl.minimum(tl.maximum(x, -87.3), 88.0)
    shifted = x * 1.44269504 + 12582912.0
    n = shifted - 12582912.0
    r = n * -0.693359375 + x
    r = n * 2.12194440e-4 + r
    p = tl.full(x.shape, 1.9875691500e-4, tl.float32)
    p = p * r + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    power = ((shifted.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
    return (p * (r * r) + r + 1.0) * power


@triton.jit
def weigh(
    records, samples, row_peaks, logits, weights, block_weights,
    VOCAB: tl.constexpr, BLOCKS: tl.constexpr, TILE_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Of rows that are drawn from: logits become values; weights [rows, VOCAB] their exponentials, block_weights
    [rows, BLOCKS] the sums of those, pair by pair as `vocabulary.cpp` has them. Grid: rows, tiles of blocks."""
    row = tl.program_id(0).to(tl.int64)
    sample = tl.load(samples + row)
    if sample >= 0:
        record, peak = records + sample * WORDS, tl.load(row_peaks + row)
        if _is_drawn(record, peak):
            blocks = tl.program_id(1) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
            tokens = (blocks * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
            at = row * VOCAB + tokens
            logit = cleaned(tl.load(logits + at, mask=tokens < VOCAB, other=float("-inf")))
            temperature = tl.full((TILE_BLOCKS, BLOCK), 0.0, tl.float32) + float_of(record, TEMPERATURE)
            value = tl.div_rn(logit - peak, temperature)
            weight = _exp(value)
            tl.store(logits + at, value, mask=tokens < VOCAB)
            tl.store(weights + at, weight, mask=tokens < VOCAB)
            # bits of the place in a block: 16 lanes of four vectors, then halves of lanes
            pairs = tl.reshape(weight, (TILE_BLOCKS, 2, 2, 2, 2, 2, 2))
            total = tl.sum(pairs, axis=2)
            total = tl.sum(total, axis=1)
            total = tl.sum(total, axis=1)
            total = tl.sum(total, axis=1)
            total = tl.sum(total, axis=1)
            total = tl.sum(total, axis=1)
            tl.store(block_weights + row * BLOCKS + blocks, total, mask=blocks < BLOCKS)


@triton.jit
def _uniform(record):
    """In [0, 1): Philox, as `draw.cpp` has it."""
    low = tl.load(record + SEED).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(record + SEED + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    first, second, _, _ = tl.philox(
        low | (high << 32), tl.load(record + POSITION), tl.load(record + POSITION + 1), tl.load(record + STREAM), 0
    )
    bits = ((first.to(tl.uint64) << 32) | second.to(tl.uint64)) >> 11
    return bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _listed(lists, first, num_listed, VOCAB: tl.constexpr, TILE: tl.constexpr, HAS_LIST: tl.constexpr):
    """Tokens of the listed blocks from number `first` on, in order, and which of them there are."""
    places = tl.arange(0, TILE)
    numbers = first + places // BLOCK
    blocks = numbers
    if HAS_LIST:
        blocks = tl.load(lists + numbers, mask=numbers < num_listed, other=0)
    tokens = blocks * BLOCK + places % BLOCK
    return tokens, (numbers < num_listed) & (tokens < VOCAB)


@triton.jit
def _up_to(
    values, weights, lists, num_listed, bound,
    VOCAB: tl.constexpr, TILE: tl.constexpr, HAS_LIST: tl.constexpr,
):  # fmt: skip
    """How many listed tokens have a key of at most `bound`, and what they weigh."""
    count = 0
    total = tl.sum(tl.zeros((TILE,), tl.float64), axis=0)
    for first in range(0, num_listed, TILE // BLOCK):
        tokens, is_there = _listed(lists, first, num_listed, VOCAB, TILE, HAS_LIST)
        is_there = is_there & (_key(tl.load(values + tokens, mask=is_there, other=float("-inf"))) <= bound)
        weight = tl.load(weights + tokens, mask=is_there, other=0.0)
        count += tl.sum(is_there.to(tl.int32), axis=0)
        total += tl.sum(weight.to(tl.float64), axis=0)
    return count, total


@triton.jit
def _least_key(
    values, weights, lists, num_listed, most, least_count, least_total,
    VOCAB: tl.constexpr, TILE: tl.constexpr, HAS_LIST: tl.constexpr,
):  # fmt: skip
    """The smallest key, at most `most`, up to which there are so many tokens and they weigh so much."""
    low, high = 0, most
    for _ in range(KEY_BITS):
        middle = low + (high - low) // 2
        count, total = _up_to(values, weights, lists, num_listed, middle, VOCAB, TILE, HAS_LIST)
        is_enough = (count >= least_count) & (total >= least_total)
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough | (low == high), low, middle + 1)
    return high


@triton.jit
def _nth_of_key(
    values, lists, num_listed, key, number,
    VOCAB: tl.constexpr, TILE: tl.constexpr, HAS_LIST: tl.constexpr,
):  # fmt: skip
    """The listed token with this key that has so many before it."""
    token = -1
    for first in range(0, num_listed, TILE // BLOCK):
        tokens, is_there = _listed(lists, first, num_listed, VOCAB, TILE, HAS_LIST)
        is_equal = is_there & (_key(tl.load(values + tokens, mask=is_there, other=float("-inf"))) == key)
        rank = tl.cumsum(is_equal.to(tl.int32), axis=0)
        found = tl.min(tl.where(is_equal & (rank == number + 1), tokens, NONE), axis=0)
        token = tl.where((found != NONE) & (token < 0), found, token)
        number -= tl.sum(is_equal.to(tl.int32), axis=0)
    return token


@triton.jit
def _in_order_of_ids(
    values, weights, lists, num_listed, bound, left,
    VOCAB: tl.constexpr, TILE: tl.constexpr, HAS_LIST: tl.constexpr,
):  # fmt: skip
    """The first listed token with a key of at most `bound` at which their weights exceed `left`; else the last one."""
    token, last = NONE, 0
    for first in range(0, num_listed, TILE // BLOCK):
        tokens, is_there = _listed(lists, first, num_listed, VOCAB, TILE, HAS_LIST)
        is_kept = is_there & (_key(tl.load(values + tokens, mask=is_there, other=float("-inf"))) <= bound)
        weight = tl.load(weights + tokens, mask=is_kept, other=0.0).to(tl.float64)
        is_beyond = is_kept & (tl.cumsum(weight, axis=0) > left)
        token = tl.minimum(token, tl.min(tl.where(is_beyond, tokens, NONE), axis=0))
        left -= tl.sum(weight, axis=0)
        last = tl.maximum(last, tl.max(tl.where(is_kept, tokens, 0), axis=0))
    return tl.where(token == NONE, last, token)


@triton.jit
def _around(
    values, weights, lists, num_listed, key,
    VOCAB: tl.constexpr, TILE: tl.constexpr, HAS_LIST: tl.constexpr,
):  # fmt: skip
    """What the listed tokens with smaller keys weigh, how many have this one, and what each of those weighs."""
    count = 0
    less = tl.sum(tl.zeros((TILE,), tl.float64), axis=0)
    each = 0.0
    for first in range(0, num_listed, TILE // BLOCK):
        tokens, is_there = _listed(lists, first, num_listed, VOCAB, TILE, HAS_LIST)
        keys = _key(tl.load(values + tokens, mask=is_there, other=float("-inf")))
        weight = tl.load(weights + tokens, mask=is_there & (keys <= key), other=0.0)
        is_equal = is_there & (keys == key)
        count += tl.sum(is_equal.to(tl.int32), axis=0)
        less += tl.sum(tl.where(is_equal, 0.0, weight).to(tl.float64), axis=0)
        each = tl.maximum(each, tl.max(tl.where(is_equal, weight, 0.0), axis=0))
    return less, count, each.to(tl.float64)


@triton.jit
def _by_weight(
    values, weights, lists, num_listed, bound, num_ties, part,
    VOCAB: tl.constexpr, TILE: tl.constexpr, HAS_LIST: tl.constexpr,
):  # fmt: skip
    """The listed tokens up to `bound`, of equal ones with that key the first `num_ties`, from the heaviest to the
    lightest: the one at which their weights exceed this part of the whole."""
    less, ties, each = _around(values, weights, lists, num_listed, bound, VOCAB, TILE, HAS_LIST)
    ties = tl.minimum(ties, num_ties)
    left = part * (less + ties.to(tl.float64) * each)
    if left < less:
        beyond = left + (left * 2.220446049250313e-16 + 5e-324)  # the next number: at least that is more than `left`
        bound = _least_key(values, weights, lists, num_listed, bound - 1, 0, beyond, VOCAB, TILE, HAS_LIST)
        less, ties, each = _around(values, weights, lists, num_listed, bound, VOCAB, TILE, HAS_LIST)
    number = tl.minimum(tl.maximum((left - less) / each, 0.0), (ties - 1).to(tl.float64)).to(tl.int32)
    return _nth_of_key(values, lists, num_listed, bound, number, VOCAB, TILE, HAS_LIST)


@triton.jit
def _filtered(
    record, values, weights, lists, num_listed, bound, total,
    VOCAB: tl.constexpr, TILE: tl.constexpr, HAS_LIST: tl.constexpr,
):  # fmt: skip
    """What top-k, top-p and min-p leave of the listed tokens with keys of at most `bound`, and a draw of that.
    UNDECIDED: others decide, too. total: of all tokens' weights."""
    top_k, top_p, min_p = tl.load(record + TOP_K), float_of(record, TOP_P), float_of(record, MIN_P)
    has_top_k = (top_k > 0) & (top_k < VOCAB)
    num_ties = NONE
    decides = bound == NEVER - 1  # whether all are there
    if has_top_k:
        count, _ = _up_to(values, weights, lists, num_listed, bound, VOCAB, TILE, HAS_LIST)
        if count >= top_k:
            bound = _least_key(values, weights, lists, num_listed, bound, top_k, float("-inf"), VOCAB, TILE, HAS_LIST)
            decides = True
    if top_p < 1.0:
        count, found = _up_to(values, weights, lists, num_listed, bound, VOCAB, TILE, HAS_LIST)
        wanted = top_p.to(tl.float64) * tl.where(has_top_k, found, total)
        if found >= wanted:
            bound = _least_key(values, weights, lists, num_listed, bound, 1, wanted, VOCAB, TILE, HAS_LIST)
            less, _, each = _around(values, weights, lists, num_listed, bound, VOCAB, TILE, HAS_LIST)
            num_ties = tl.maximum(tl.ceil((wanted - less) / each), 1.0).to(tl.int32)
            decides = decides | (not has_top_k)
    if min_p > 0.0:
        least = tl.minimum(tl.log(min_p.to(tl.float64)), 0.0).to(tl.float32)
        least_key = _key(least)
        decides = decides | ((not has_top_k) & (top_p >= 1.0) & (least_key <= bound))
        if least_key < bound:
            bound = least_key
            num_ties = NONE
    token = UNDECIDED
    if decides:
        part = _uniform(record)
        if top_p < 1.0:
            token = _by_weight(values, weights, lists, num_listed, bound, num_ties, part, VOCAB, TILE, HAS_LIST)
        else:
            _, kept = _up_to(values, weights, lists, num_listed, bound, VOCAB, TILE, HAS_LIST)
            token = _in_order_of_ids(values, weights, lists, num_listed, bound, part * kept, VOCAB, TILE, HAS_LIST)
    return token


@triton.jit
def _key_of_rank(keys, rank):
    """The smallest key up to which there are so many; NEVER if there are not."""
    low, high = 0, NEVER
    for _ in range(KEY_BITS):
        middle = low + (high - low) // 2
        is_enough = tl.sum((keys <= middle).to(tl.int32), axis=0) >= rank
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough | (low == high), low, middle + 1)
    return high


@triton.jit
def _is_filtered(record, VOCAB: tl.constexpr):
    top_k = tl.load(record + TOP_K)
    is_cut = (top_k > 0) & (top_k < VOCAB)
    return is_cut | (float_of(record, TOP_P) < 1.0) | (float_of(record, MIN_P) > 0.0)


@triton.jit
def list_blocks(
    records, samples, row_peaks, peaks, lists, listed,
    VOCAB: tl.constexpr, BLOCKS: tl.constexpr, TILE_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Where something filters: lists [rows, BLOCKS], numbers of the FEW_BLOCKS blocks with the largest peaks, in order;
    listed [rows, 2]: how many these are, ties included, and the key up to which every token is in one of them. Grid:
    rows; TILE_BLOCKS is at least BLOCKS."""
    row = tl.program_id(0).to(tl.int64)
    sample = tl.load(samples + row)
    if sample >= 0:
        record, peak = records + sample * WORDS, tl.load(row_peaks + row)
        if _is_drawn(record, peak) & _is_filtered(record, VOCAB):
            blocks = tl.arange(0, TILE_BLOCKS)
            found = tl.load(peaks + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=float("-inf"))
            temperature = tl.zeros((TILE_BLOCKS,), tl.float32) + float_of(record, TEMPERATURE)
            keys = _key(tl.div_rn(found - peak, temperature))
            bound = tl.minimum(_key_of_rank(keys, FEW_BLOCKS), NEVER - 1)
            is_listed = (keys <= bound).to(tl.int32)
            tl.store(lists + row * BLOCKS + tl.cumsum(is_listed, axis=0) - 1, blocks, mask=keys <= bound)
            tl.store(listed + 2 * row, tl.sum(is_listed, axis=0))
            tl.store(listed + 2 * row + 1, bound)


@triton.jit
def draw_filtered(
    records, samples, row_peaks, logits, weights, block_weights, lists, listed, tokens,
    VOCAB: tl.constexpr, BLOCKS: tl.constexpr, TILE_BLOCKS: tl.constexpr, TILE: tl.constexpr, IS_FIRST: tl.constexpr,
):  # fmt: skip
    """tokens[sample], by chance, of what the filters leave: the first time of the listed blocks, UNDECIDED if these do
    not decide; then of all. Grid: rows; TILE_BLOCKS is at least BLOCKS."""
    row = tl.program_id(0).to(tl.int64)
    sample = tl.load(samples + row)
    if sample >= 0:
        record = records + sample * WORDS
        is_wanted = _is_drawn(record, tl.load(row_peaks + row)) & _is_filtered(record, VOCAB)
        if not IS_FIRST:
            is_wanted = is_wanted & (tl.load(tokens + sample) == UNDECIDED)
        if is_wanted:
            blocks = tl.arange(0, TILE_BLOCKS)
            block_weight = tl.load(block_weights + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=0.0)
            total = tl.sum(block_weight.to(tl.float64), axis=0)
            num_listed, bound = tl.load(listed + 2 * row), tl.load(listed + 2 * row + 1)
            if not IS_FIRST:
                num_listed, bound = tl.maximum(num_listed, BLOCKS), tl.maximum(bound, NEVER - 1)
            token = _filtered(
                record, logits + row * VOCAB, weights + row * VOCAB, lists + row * BLOCKS, num_listed, bound, total,
                VOCAB, TILE, IS_FIRST,
            )  # fmt: skip
            tl.store(tokens + sample, token)


@triton.jit
def draw(
    records, samples, row_peaks, logits, weights, block_weights, tokens,
    VOCAB: tl.constexpr, BLOCKS: tl.constexpr, TILE_BLOCKS: tl.constexpr,
):  # fmt: skip
    """tokens[sample], by chance, where nothing filters. Grid: rows; TILE_BLOCKS is at least BLOCKS."""
    row = tl.program_id(0).to(tl.int64)
    sample = tl.load(samples + row)
    if sample >= 0:
        record = records + sample * WORDS
        if _is_drawn(record, tl.load(row_peaks + row)) & (not _is_filtered(record, VOCAB)):
            blocks = tl.arange(0, TILE_BLOCKS)
            values, row_weights = logits + row * VOCAB, weights + row * VOCAB
            weight = tl.load(block_weights + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=0.0).to(tl.float64)
            left = _uniform(record) * tl.sum(weight, axis=0)
            block = tl.min(tl.where(tl.cumsum(weight, axis=0) > left, blocks, BLOCKS - 1), axis=0)
            left -= tl.sum(tl.where(blocks < block, weight, 0.0), axis=0)
            places = block * BLOCK + tl.arange(0, 2 * BLOCK)  # a block's sum may be rounded up: then it is in the next
            value = tl.load(values + places, mask=places < VOCAB, other=float("-inf"))
            can_be = value > float("-inf")
            weight = tl.load(row_weights + places, mask=can_be, other=0.0).to(tl.float64)
            token = tl.min(tl.where(can_be & (tl.cumsum(weight, axis=0) > left), places, NONE), axis=0)
            last = tl.max(tl.where(can_be, places, -1), axis=0)
            last = tl.where(last >= 0, last, tl.load(tokens + sample))
            tl.store(tokens + sample, tl.where(token != NONE, token, last))
