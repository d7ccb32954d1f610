"""The data for choosing tokens on the device, and which of a step's tokens are chosen there.

The requests of a step come as the records and ids that the library of the CPU engine reads (`native/step.py`). If a
request only needs a token, the device chooses it; the library handles masks, log-probs, likely tokens and logits on the
host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmserve.engine.cuda.inputs import arrays_behind
from llmserve.engine.cuda.layout import EngineHeader
from llmserve.engine.native.records import SAMPLE, num_words
from llmserve.engine.native.step import NO_MASK, FlatStep

BLOCK_TOKENS = 64  # of a vocabulary
RANGES = ("history", "bias", "banned")  # of ids
MOST_IDS = 1 << 20  # of a step's history, bias and banned ids
NOBODY = -1

Words = NDArray[np.int32]


def num_blocks_of(vocab_size: int) -> int:
    return -(-vocab_size // BLOCK_TOKENS)


def most_ids(header: EngineHeader) -> int:
    return min(header.max_batch_size * header.max_seq_len, MOST_IDS)


def choice_offsets(header: EngineHeader) -> tuple[dict[str, int], int]:
    """Offsets in bytes of consecutive arrays of 32-bit numbers, and their total size."""
    rows, samples, ids = header.head_rows, header.max_num_tokens, most_ids(header)
    vocab_size, blocks = header.vocab_size, num_blocks_of(header.vocab_size)
    sizes = {
        "records": num_words(SAMPLE) * samples,
        "ids": ids,
        "biases": ids,
        "selected": rows,  # of a piece: rows of the step's tokens, followed by the sample of each
        "samples": rows,
        "tokens": samples,
        "banned_logits": ids,
        "counts": rows * vocab_size,
        "weights": rows * vocab_size,
        "peaks": rows * blocks,
        "row_peaks": rows,
        "block_weights": rows * blocks,
        "lists": rows * blocks,
        "listed": 2 * rows,
    }
    return arrays_behind(sizes)


class StepChoice(NamedTuple):
    """For one step."""

    records: NDArray[Any]  # of dtype SAMPLE
    rows: Words  # for each selected row: the sample that the device chooses there, or NOBODY
    is_chosen: Sequence[bool]  # for each sample, whether the device chooses it
    has_edits: bool  # of those
    has_draws: bool

    @property
    def chosen(self) -> Words:
        """Samples that the device chooses."""
        return np.flatnonzero(self.is_chosen).astype(np.int32)


def step_choice(flat: FlatStep, header: EngineHeader) -> StepChoice:
    records = flat.samples
    rows = np.full(len(flat.selected), NOBODY, np.int32)
    wants_more = (records["want_log_prob"] != 0) | (records["num_top"] != 0)
    is_plain = ~wants_more & (records["first_mask"] == NO_MASK)
    if len(flat.kept):
        is_plain &= ~np.isin(records["selected"], flat.kept)
    is_edited = np.zeros(len(records), bool)
    for name in RANGES:
        is_edited |= records[f"{name}_begin"] != records[f"{name}_end"]
    if len(flat.sample_ids) > most_ids(header):
        is_plain &= ~is_edited
    places = np.flatnonzero(is_plain)
    plain = records[places]
    rows[plain["selected"]] = places
    is_drawn = plain["temperature"] != 0
    return StepChoice(records, rows, is_plain.tolist(), bool(is_edited[places].any()), bool(is_drawn.any()))
