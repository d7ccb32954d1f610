"""What tokens are chosen with on the device, and which of a step's tokens are chosen there.

The requests of a step come as the records and ids that the library of the CPU engine reads (`native/step.py`). Who
wants nothing but a token gets it from the device; masks, log-probs, likely tokens and logits are the library's, on the
host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmserve.engine.cuda.layout import EngineHeader
from llmserve.engine.native.step import NO_MASK, FlatStep

BLOCK_TOKENS = 64  # of a vocabulary
RECORD_WORDS = 24
SELECTED, TEMPERATURE, WANTS_LOG_PROB, NUM_TOP, FIRST_MASK = 5, 14, 20, 21, 23
RANGES = ((6, 7), (9, 10), (11, 12))  # of history, bias and banned ids
MOST_IDS = 1 << 20  # of a step's history, bias and banned ids
ITEM_BYTES = 4
ALIGNMENT = 64  # items
NOBODY = -1

Words = NDArray[np.int32]


def num_blocks_of(vocab_size: int) -> int:
    return -(-vocab_size // BLOCK_TOKENS)


def most_ids(header: EngineHeader) -> int:
    return min(header.max_batch_size * header.max_seq_len, MOST_IDS)


def choice_offsets(header: EngineHeader) -> tuple[dict[str, int], int]:
    """Places in bytes of arrays of 32-bit numbers, one behind the other, and what they take together."""
    rows, batch, ids = header.head_rows, header.max_batch_size, most_ids(header)
    vocab_size, blocks = header.vocab_size, num_blocks_of(header.vocab_size)
    sizes = {
        "records": RECORD_WORDS * batch,
        "ids": ids,
        "biases": ids,
        "selected": rows,  # of a piece: rows of the step's tokens, and behind them which sample each is for
        "samples": rows,
        "tokens": batch,
        "banned_logits": ids,
        "counts": rows * vocab_size,
        "weights": rows * vocab_size,
        "peaks": rows * blocks,
        "row_peaks": rows,
        "block_weights": rows * blocks,
        "lists": rows * blocks,
        "listed": 2 * rows,
    }
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end * ITEM_BYTES
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end * ITEM_BYTES


class StepChoice(NamedTuple):
    """Of one step."""

    records: Words  # [samples, RECORD_WORDS]
    rows: Words  # of each selected row: the sample that the device chooses there, or NOBODY
    is_chosen: Sequence[bool]  # of each sample, whether by the device
    has_edits: bool  # of those
    has_draws: bool

    @property
    def chosen(self) -> Words:
        """Samples that the device chooses."""
        return np.flatnonzero(self.is_chosen).astype(np.int32)


def step_choice(flat: FlatStep, header: EngineHeader) -> StepChoice:
    records = flat.samples
    rows = np.full(len(flat.selected), NOBODY, np.int32)
    wants_more = (records[:, WANTS_LOG_PROB] != 0) | (records[:, NUM_TOP] != 0)
    is_plain = ~wants_more & (records[:, FIRST_MASK].view(np.uint32) == NO_MASK)
    if len(flat.kept):
        is_plain &= ~np.isin(records[:, SELECTED], flat.kept)
    is_edited = np.zeros(len(records), bool)
    for begin, end in RANGES:
        is_edited |= records[:, begin] != records[:, end]
    if len(flat.sample_ids) > most_ids(header):
        is_plain &= ~is_edited
    places = np.flatnonzero(is_plain)
    rows[records[places, SELECTED]] = places
    is_drawn = records[places, TEMPERATURE] != 0
    return StepChoice(records, rows, is_plain.tolist(), bool(is_edited[places].any()), bool(is_drawn.any()))
