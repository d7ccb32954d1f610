"""Ops with a state of each sequence, and what is kept of it from one step to the next.

A state has a slot of STATE_STRIDE numbers in `states`; an op is given where its own begin. `chunks` has six numbers for
each sequence of the step, as `inputs.CHUNK` names them. The slot before is negative where a sequence begins: its state
is zero. A chunk's slots may be the same one, and no other chunk writes what it reads.

A token's results depend on its own numbers and on the state before it, which are the same wherever a chunk begins.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmserve.engine.cuda.kernels.activations import activate, sigmoid, softplus

LEAST_LENGTH: tl.constexpr = tl.constexpr(1e-6)  # squared, of what is divided by its length
CHUNK_ITEMS: tl.constexpr = tl.constexpr(6)


@triton.jit
def _chunk(chunks, number):
    """Its first row, its tokens, the slots before and behind it, and the slot that is kept behind so many of them."""
    at = chunks + number * CHUNK_ITEMS
    return (
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
    )  # fmt: skip


@triton.jit
def _slot(states, slot, STATE_STRIDE: tl.constexpr):
    return states + slot.to(tl.int64) * STATE_STRIDE


@triton.jit
def _row(
    x, before, place, has_before, columns,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, X_STRIDE: tl.constexpr,
):  # fmt: skip
    """Row `place` of a chunk, whose first one `x` is; negative: of the TAPS - 1 rows that its state has."""
    num_here, num_kept = tl.where(place >= 0, WIDTH, 0), tl.where((place < 0) & has_before, WIDTH, 0)
    here = tl.load(x + place.to(tl.int64) * X_STRIDE + columns, mask=columns < num_here, other=0.0)
    kept = tl.load(before + (place + TAPS - 1) * WIDTH + columns, mask=columns < num_kept, other=0.0)
    return tl.where(place >= 0, here.to(tl.float32), kept)


@triton.jit
def convolution(
    x, weight, bias, states, chunks, chunk_of_row, y,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, STATE_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """y[t] = bias + the sum of weight[:, j] * x[t - TAPS + 1 + j], in order; then silu(y). Grid: rows, tiles of
    columns."""
    row = tl.program_id(0)
    chunk = tl.load(chunk_of_row + row)
    if chunk >= 0:
        first_row, slot = tl.load(chunks + chunk * CHUNK_ITEMS), tl.load(chunks + chunk * CHUNK_ITEMS + 2)
        columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        is_column = columns < WIDTH
        begin, before = x + first_row.to(tl.int64) * X_STRIDE, _slot(states, slot, STATE_STRIDE)
        sums = tl.zeros((TILE_COLUMNS,), tl.float32)
        if HAS_BIAS:
            sums = tl.load(bias + columns, mask=is_column, other=0.0)
        for tap in tl.static_range(TAPS):
            place = row - first_row - (TAPS - 1) + tap
            values = _row(begin, before, place, slot >= 0, columns, WIDTH, TAPS, X_STRIDE)
            sums += tl.load(weight + columns * TAPS + tap, mask=is_column, other=0.0) * values
        if SILU:
            sums = activate(sums, "silu")
        tl.store(y + row.to(tl.int64) * Y_STRIDE + columns, sums.to(y.dtype.element_ty), mask=is_column)


@triton.jit
def keep_rows(
    x, states, chunks,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, STATE_STRIDE: tl.constexpr, X_STRIDE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """What `convolution` will find of each chunk: the last TAPS - 1 rows of it, and of the tokens that a state is kept
    behind. Grid: tiles, of which there is one for each chunk at least, tiles of columns."""
    first_row, num_tokens, slot, after, kept, num_kept = _chunk(chunks, tl.program_id(0))
    if num_tokens > 0:
        columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        begin, before = x + first_row.to(tl.int64) * X_STRIDE, _slot(states, slot, STATE_STRIDE)
        behind = ()
        between = ()
        for place in tl.static_range(TAPS - 1):
            end = place - (TAPS - 1)
            behind = behind + (_row(begin, before, num_tokens + end, slot >= 0, columns, WIDTH, TAPS, X_STRIDE),)
            between = between + (_row(begin, before, num_kept + end, slot >= 0, columns, WIDTH, TAPS, X_STRIDE),)
        tl.debug_barrier()  # all is read before anything is written: slots may be the same
        for place in tl.static_range(TAPS - 1):
            at = place * WIDTH + columns
            width = tl.where(num_kept > 0, WIDTH, 0)
            tl.store(_slot(states, kept, STATE_STRIDE) + at, between[place], mask=columns < width)
            tl.store(_slot(states, after, STATE_STRIDE) + at, behind[place], mask=columns < WIDTH)


@triton.jit
def _matrix(states, slot, head, rows, columns, NUM_ROWS: tl.constexpr, NUM_COLUMNS: tl.constexpr,
            STATE_STRIDE: tl.constexpr):  # fmt: skip
    """Addresses of rows and columns of a head's matrix, and which of them there are."""
    at = (head * NUM_ROWS + rows)[:, None] * NUM_COLUMNS + columns[None, :]
    return _slot(states, slot, STATE_STRIDE) + at, (rows < NUM_ROWS)[:, None] & (columns < NUM_COLUMNS)[None, :]


@triton.jit
def _keys_and_values(
    qkv, gates, row, key_head, head, keys, values,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    X_STRIDE: tl.constexpr, GATES_STRIDE: tl.constexpr,
):  # fmt: skip
    """What a token of a head reads: query, key, value, and both gates."""
    x = qkv + row.to(tl.int64) * X_STRIDE
    of_keys, is_key = key_head * KEY_DIM + keys, keys < KEY_DIM
    q = tl.load(x + of_keys, mask=is_key, other=0.0).to(tl.float32)
    k = tl.load(x + NUM_KEY_HEADS * KEY_DIM + of_keys, mask=is_key, other=0.0).to(tl.float32)
    of_values = 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM + values
    v = tl.load(x + of_values, mask=values < VALUE_DIM, other=0.0).to(tl.float32)
    at = gates + row.to(tl.int64) * GATES_STRIDE + head
    return q, k, v, tl.load(at).to(tl.float32), tl.load(at + NUM_HEADS).to(tl.float32)


@triton.jit
def delta_rule(
    qkv, gates, decay, bias, states, chunks, y,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    SCALE: tl.constexpr, STATE_STRIDE: tl.constexpr, X_STRIDE: tl.constexpr, GATES_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr, TILE_STATE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """A head's columns of values, whose part of its matrix [KEY_DIM, VALUE_DIM] every token of a chunk changes in turn;
    `Graph.delta_rule` says how. What the next token reads is loaded before. Grid: tiles, heads, tiles of values."""
    first_row, num_tokens, before, after, kept, num_kept = _chunk(chunks, tl.program_id(0))
    head = tl.program_id(1)
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    keys = tl.arange(0, TILE_STATE_ROWS)
    values = tl.program_id(2) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    if num_tokens > 0:
        fading, shift = tl.exp(tl.load(decay + head)), tl.load(bias + head)
        at, is_there = _matrix(states, before, head, keys, values, KEY_DIM, VALUE_DIM, STATE_STRIDE)
        state = tl.zeros((TILE_STATE_ROWS, TILE_COLUMNS), tl.float32)
        if before >= 0:
            state = tl.load(at, mask=is_there, other=0.0)
        q, k, v, b, a = _keys_and_values(
            qkv, gates, first_row, key_head, head, keys, values,
            NUM_HEADS, NUM_KEY_HEADS, KEY_DIM, VALUE_DIM, X_STRIDE, GATES_STRIDE,
        )  # fmt: skip
        for token in range(num_tokens):
            row = first_row + token
            next_q, next_k, next_v, next_b, next_a = _keys_and_values(
                qkv, gates, first_row + tl.minimum(token + 1, num_tokens - 1), key_head, head, keys, values,
                NUM_HEADS, NUM_KEY_HEADS, KEY_DIM, VALUE_DIM, X_STRIDE, GATES_STRIDE,
            )  # fmt: skip
            q = q * (SCALE / tl.sqrt_rn(tl.sum(q * q, axis=0) + LEAST_LENGTH))
            k = k * (1.0 / tl.sqrt_rn(tl.sum(k * k, axis=0) + LEAST_LENGTH))
            state = state * tl.exp(-fading * softplus(a + shift))
            change = (v - tl.sum(k[:, None] * state, axis=0)) * sigmoid(b)
            state = state + k[:, None] * change[None, :]
            found = tl.sum(q[:, None] * state, axis=0)
            to = y + row.to(tl.int64) * Y_STRIDE + head * VALUE_DIM + values
            tl.store(to, found.to(y.dtype.element_ty), mask=values < VALUE_DIM)
            if token + 1 == num_kept:
                at, is_there = _matrix(states, kept, head, keys, values, KEY_DIM, VALUE_DIM, STATE_STRIDE)
                tl.store(at, state, mask=is_there)
            q, k, v, b, a = next_q, next_k, next_v, next_b, next_a
        at, is_there = _matrix(states, after, head, keys, values, KEY_DIM, VALUE_DIM, STATE_STRIDE)
        tl.store(at, state, mask=is_there)


@triton.jit
def _step_and_groups(
    xbc, steps, row, group, head, rows, columns,
    NUM_HEADS: tl.constexpr, NUM_GROUPS: tl.constexpr, STATE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    X_STRIDE: tl.constexpr, STEPS_STRIDE: tl.constexpr,
):  # fmt: skip
    """What a token of a head reads: x, b and c of the head's group, and its step."""
    begin = xbc + row.to(tl.int64) * X_STRIDE
    x = tl.load(begin + head * HEAD_DIM + columns, mask=columns < HEAD_DIM, other=0.0).to(tl.float32)
    of_group = NUM_HEADS * HEAD_DIM + group * STATE_SIZE + rows
    b = tl.load(begin + of_group, mask=rows < STATE_SIZE, other=0.0).to(tl.float32)
    c = tl.load(begin + NUM_GROUPS * STATE_SIZE + of_group, mask=rows < STATE_SIZE, other=0.0).to(tl.float32)
    return x, b, c, tl.load(steps + row.to(tl.int64) * STEPS_STRIDE + head).to(tl.float32)


@triton.jit
def selective_scan(
    xbc, steps, decay, bias, skip, states, chunks, y,
    NUM_HEADS: tl.constexpr, NUM_GROUPS: tl.constexpr, STATE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    STATE_STRIDE: tl.constexpr, X_STRIDE: tl.constexpr, STEPS_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr,
    TILE_STATE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """As `delta_rule`, of matrices [STATE_SIZE, HEAD_DIM]; `Graph.selective_scan` says how they change. Grid: tiles,
    heads, tiles of columns."""
    first_row, num_tokens, before, after, kept, num_kept = _chunk(chunks, tl.program_id(0))
    head = tl.program_id(1)
    group = head // (NUM_HEADS // NUM_GROUPS)
    rows = tl.arange(0, TILE_STATE_ROWS)
    columns = tl.program_id(2) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    if num_tokens > 0:
        fading, shift, through = tl.exp(tl.load(decay + head)), tl.load(bias + head), tl.load(skip + head)
        at, is_there = _matrix(states, before, head, rows, columns, STATE_SIZE, HEAD_DIM, STATE_STRIDE)
        state = tl.zeros((TILE_STATE_ROWS, TILE_COLUMNS), tl.float32)
        if before >= 0:
            state = tl.load(at, mask=is_there, other=0.0)
        x, b, c, step = _step_and_groups(
            xbc, steps, first_row, group, head, rows, columns,
            NUM_HEADS, NUM_GROUPS, STATE_SIZE, HEAD_DIM, X_STRIDE, STEPS_STRIDE,
        )  # fmt: skip
        for token in range(num_tokens):
            row = first_row + token
            next_x, next_b, next_c, next_step = _step_and_groups(
                xbc, steps, first_row + tl.minimum(token + 1, num_tokens - 1), group, head, rows, columns,
                NUM_HEADS, NUM_GROUPS, STATE_SIZE, HEAD_DIM, X_STRIDE, STEPS_STRIDE,
            )  # fmt: skip
            size = softplus(step + shift)
            state = state * tl.exp(-fading * size) + b[:, None] * (x * size)[None, :]
            found = x * through + tl.sum(c[:, None] * state, axis=0)
            to = y + row.to(tl.int64) * Y_STRIDE + head * HEAD_DIM + columns
            tl.store(to, found.to(y.dtype.element_ty), mask=columns < HEAD_DIM)
            if token + 1 == num_kept:
                at, is_there = _matrix(states, kept, head, rows, columns, STATE_SIZE, HEAD_DIM, STATE_STRIDE)
                tl.store(at, state, mask=is_there)
            x, b, c, step = next_x, next_b, next_c, next_step
        at, is_there = _matrix(states, after, head, rows, columns, STATE_SIZE, HEAD_DIM, STATE_STRIDE)
        tl.store(at, state, mask=is_there)
