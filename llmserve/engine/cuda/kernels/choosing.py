"""From rows of logits to tokens, as the library of the CPU engine does it (`cpu/kernels/sampling.h`, `draw.h`).

`records` are that library's (`native/records.py`): WORDS integers for each sample of the step, `samples` says which of
them a row's logits are for (negative: none, and they stay as they are). Order: penalties, bias, bans; the largest; one
draw. Equal logits give equal tokens, but for sums of float64, which are taken in another order here: a draw that falls
within 1e-13 of the border between two tokens may fall on the other side.

A row's vocabulary is BLOCKS blocks of BLOCK tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmserve.engine.native.records import SAMPLE, num_words, word_of

WORDS: tl.constexpr = tl.constexpr(num_words(SAMPLE))
SEED: tl.constexpr = tl.constexpr(word_of(SAMPLE, "seed"))
POSITION: tl.constexpr = tl.constexpr(word_of(SAMPLE, "position"))
STREAM: tl.constexpr = tl.constexpr(word_of(SAMPLE, "stream"))
HISTORY: tl.constexpr = tl.constexpr(word_of(SAMPLE, "history_begin"))
HISTORY_END: tl.constexpr = tl.constexpr(word_of(SAMPLE, "history_end"))
NUM_PROMPT: tl.constexpr = tl.constexpr(word_of(SAMPLE, "num_prompt"))
BIAS: tl.constexpr = tl.constexpr(word_of(SAMPLE, "bias_begin"))
BIAS_END: tl.constexpr = tl.constexpr(word_of(SAMPLE, "bias_end"))
BANNED: tl.constexpr = tl.constexpr(word_of(SAMPLE, "banned_begin"))
BANNED_END: tl.constexpr = tl.constexpr(word_of(SAMPLE, "banned_end"))
TOP_K: tl.constexpr = tl.constexpr(word_of(SAMPLE, "top_k"))
TEMPERATURE: tl.constexpr = tl.constexpr(word_of(SAMPLE, "temperature"))
TOP_P: tl.constexpr = tl.constexpr(word_of(SAMPLE, "top_p"))
MIN_P: tl.constexpr = tl.constexpr(word_of(SAMPLE, "min_p"))
REPETITION: tl.constexpr = tl.constexpr(word_of(SAMPLE, "repetition_penalty"))
PRESENCE: tl.constexpr = tl.constexpr(word_of(SAMPLE, "presence_penalty"))
FREQUENCY: tl.constexpr = tl.constexpr(word_of(SAMPLE, "frequency_penalty"))

SEEN: tl.constexpr = tl.constexpr(1 << 30)  # beside how often a token is in the output
BLOCK: tl.constexpr = tl.constexpr(64)
NONE: tl.constexpr = tl.constexpr(0x7FFFFFFF)
MOST: tl.constexpr = tl.constexpr(3.4028234663852886e38)


@triton.jit
def cleaned(logits):
    """NaN as minus infinity, plus infinity as the largest float."""
    return tl.minimum(tl.where(logits == logits, logits, float("-inf")), MOST)


@triton.jit
def float_of(record, WORD: tl.constexpr):
    return tl.load(record + WORD).to(tl.float32, bitcast=True)


@triton.jit
def count_history(
    records, samples, ids, counts,
    VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """counts [rows, VOCAB], zero before: how often a token is in the output, and SEEN if it is anywhere. Grid: rows,
    tiles of the history."""
    row = tl.program_id(0)
    sample = tl.load(samples + row)
    if sample >= 0:
        record = records + sample * WORDS
        begin, end = tl.load(record + HISTORY), tl.load(record + HISTORY_END)
        first = begin + tl.program_id(1) * TILE
        if first < end:
            places = first + tl.arange(0, TILE)
            is_there = places < end
            at = counts + row.to(tl.int64) * VOCAB + tl.load(ids + places, mask=is_there, other=0)
            is_output = is_there & (places - begin >= tl.load(record + NUM_PROMPT))
            tl.atomic_or(at, tl.full((TILE,), SEEN, tl.int32), mask=is_there)
            tl.atomic_add(at, tl.full((TILE,), 1, tl.int32), mask=is_output)


@triton.jit
def penalize(
    records, samples, counts, logits,
    VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Takes the counts back to zero. Grid: rows, tiles of the vocabulary."""
    row = tl.program_id(0)
    sample = tl.load(samples + row)
    if sample >= 0:
        record = records + sample * WORDS
        if tl.load(record + HISTORY) < tl.load(record + HISTORY_END):
            tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
            at = row.to(tl.int64) * VOCAB + tokens
            found = tl.load(counts + at, mask=tokens < VOCAB, other=0)
            is_seen = found != 0
            logit = cleaned(tl.load(logits + at, mask=is_seen, other=0.0))
            repetition = float_of(record, REPETITION)
            logit = tl.where(logit > 0.0, tl.div_rn(logit, repetition), logit * repetition)
            count = found & (SEEN - 1)
            penalty = float_of(record, PRESENCE) + count.to(tl.float32) * float_of(record, FREQUENCY)
            logit = tl.where(count > 0, logit - penalty, logit)
            tl.store(logits + at, cleaned(logit), mask=is_seen)
            tl.store(counts + at, tl.zeros((TILE,), tl.int32), mask=is_seen)


@triton.jit
def add_bias(
    records, samples, ids, biases, logits,
    VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """No token comes twice. Grid: rows."""
    row = tl.program_id(0)
    sample = tl.load(samples + row)
    if sample >= 0:
        record = records + sample * WORDS
        end = tl.load(record + BIAS_END)
        for first in range(tl.load(record + BIAS), end, TILE):
            places = first + tl.arange(0, TILE)
            at = logits + row.to(tl.int64) * VOCAB + tl.load(ids + places, mask=places < end, other=0)
            logit = cleaned(tl.load(at, mask=places < end, other=0.0))
            logit = logit + tl.load(biases + places, mask=places < end, other=0.0)
            tl.store(at, cleaned(logit), mask=places < end)


@triton.jit
def ban(
    records, samples, ids, logits, banned_logits,
    VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What the logits were goes to `banned_logits`. No token comes twice. Grid: rows."""
    row = tl.program_id(0)
    sample = tl.load(samples + row)
    if sample >= 0:
        record = records + sample * WORDS
        end = tl.load(record + BANNED_END)
        for first in range(tl.load(record + BANNED), end, TILE):
            places = first + tl.arange(0, TILE)
            at = logits + row.to(tl.int64) * VOCAB + tl.load(ids + places, mask=places < end, other=0)
            logit = tl.load(at, mask=places < end, other=0.0)
            tl.store(banned_logits + places, logit, mask=places < end)
            tl.store(at, tl.full((TILE,), float("-inf"), tl.float32), mask=places < end)


@triton.jit
def find_peaks(
    samples, logits, peaks,
    VOCAB: tl.constexpr, BLOCKS: tl.constexpr, TILE_BLOCKS: tl.constexpr,
):  # fmt: skip
    """peaks [rows, BLOCKS]. Grid: rows, tiles of blocks."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(samples + row) >= 0:
        blocks = tl.program_id(1) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
        tokens = (blocks * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
        logit = cleaned(tl.load(logits + row * VOCAB + tokens, mask=tokens < VOCAB, other=float("-inf")))
        tl.store(peaks + row * BLOCKS + blocks, tl.max(logit, axis=1), mask=blocks < BLOCKS)


@triton.jit
def choose_best(
    records, samples, ids, logits, banned_logits, peaks, row_peaks, tokens,
    VOCAB: tl.constexpr, BLOCKS: tl.constexpr, TILE_BLOCKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """tokens[sample]: of the largest logits the lowest id; and row_peaks. When nothing is left, bans do not count, and
    the peak is minus infinity. Grid: rows; TILE_BLOCKS is at least BLOCKS."""
    row = tl.program_id(0).to(tl.int64)
    sample = tl.load(samples + row)
    if sample >= 0:
        blocks = tl.arange(0, TILE_BLOCKS)
        found = tl.load(peaks + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=float("-inf"))
        peak = tl.max(found, axis=0)
        block = tl.min(tl.where(found == peak, blocks, BLOCKS), axis=0)
        token = 0
        if peak > float("-inf"):
            places = block * BLOCK + tl.arange(0, BLOCK)
            logit = tl.load(logits + row * VOCAB + places, mask=places < VOCAB, other=float("-inf"))
            token = tl.min(tl.where(cleaned(logit) >= peak, places, NONE), axis=0)
        else:
            token = _best_banned(records + sample * WORDS, ids, banned_logits, TILE)
        tl.store(row_peaks + row, peak)
        tl.store(tokens + sample, token)


@triton.jit
def _best_banned(record, ids, banned_logits, TILE: tl.constexpr):
    """0 if there is none."""
    begin, end = tl.load(record + BANNED), tl.load(record + BANNED_END)
    best = float("-inf")
    token = 0
    for first in range(begin, end, TILE):
        places = first + tl.arange(0, TILE)
        logit = cleaned(tl.load(banned_logits + places, mask=places < end, other=float("-inf")))
        peak = tl.max(logit, axis=0)
        if peak > best:  # ids grow, so that the first of equal ones is the lowest
            there = tl.load(ids + places, mask=places < end, other=0)
            token = tl.min(tl.where(logit == peak, there, NONE), axis=0)
            best = peak
    return token
