"""What a step's records look like in memory: the one place in Python that says so.

`kernels/step.h` has the same structs; `tests/engine/native/test_records.py` compares every field. The CUDA engine and
its kernels find fields by the names here. Types are the letters of `struct`, which numpy takes too.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np

Fields: TypeAlias = tuple[tuple[str, str], ...]

WORD_BYTES = 4
assert sys.byteorder == "little", "the records are little endian"


def _fields(type_: str, *names: str) -> Fields:
    return tuple((name, type_) for name in names)


def _packer(fields: Iterable[tuple[str, str]]) -> struct.Struct:
    """For records that many steps are full of: several times as fast as an array's fields one by one."""
    return struct.Struct("<" + "".join(type_ for _, type_ in fields))


CHUNK_FIELDS = _fields("I", "first_token", "num_tokens", "start", "first_block", "num_blocks")
CHUNK_FIELDS += _fields("I", "state_before", "state_after", "state_kept", "num_kept", "second_segment", "adapter")
# A sample's record is packed in three parts: its place in the step, how its request draws, what else it wants.
PLACE_FIELDS = (
    *_fields("Q", "seed", "position"),
    *_fields("I", "stream", "selected", "history_begin", "history_end", "num_prompt"),
    *_fields("I", "bias_begin", "bias_end", "banned_begin", "banned_end"),
)
DRAW_FIELDS = (
    *_fields("I", "top_k"),
    *_fields("f", "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
)
WANTS_FIELDS = _fields("I", "want_log_prob", "num_top", "first_top", "first_mask")
SCORE_FIELDS = (("selected", "I"), ("token", "i"), *_fields("I", "num_top", "first_top"))

CHUNK = np.dtype([*CHUNK_FIELDS], align=True)
SAMPLE = np.dtype([*PLACE_FIELDS, *DRAW_FIELDS, *WANTS_FIELDS], align=True)
SCORE = np.dtype([*SCORE_FIELDS], align=True)
PACK_CHUNK, PACK_SCORE = _packer(CHUNK_FIELDS), _packer(SCORE_FIELDS)
PACK_PLACE, PACK_DRAW, PACK_WANTS = _packer(PLACE_FIELDS), _packer(DRAW_FIELDS), _packer(WANTS_FIELDS)
assert (CHUNK.itemsize, SCORE.itemsize) == (PACK_CHUNK.size, PACK_SCORE.size)
assert SAMPLE.itemsize == PACK_PLACE.size + PACK_DRAW.size + PACK_WANTS.size


def num_words(record: np.dtype[Any]) -> int:
    return record.itemsize // WORD_BYTES


def word_of(record: np.dtype[Any], field: str) -> int:
    """Where a field begins, for kernels that read a record as words."""
    assert record.fields is not None
    return record.fields[field][1] // WORD_BYTES


class AdapterPartRecord(ctypes.Structure):
    """`kernels/adapters.h`"""

    _fields_ = (
        ("down", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        *((name, ctypes.c_uint32) for name in ("op", "dtype", "first_column", "columns", "depth", "rank")),
        *((name, ctypes.c_uint32) for name in ("first_rank", "num_ranks")),
    )


class StepRecord(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("token_ids", "chunks", "block_ids", "selected_rows", "kept_rows")),
        *((name, ctypes.c_void_p) for name in ("samples", "scores", "sample_ids", "bias_values", "mask_words")),
        *((name, ctypes.c_void_p) for name in ("hidden", "masks_ready")),
        *((name, ctypes.c_void_p) for name in ("tokens", "log_probs", "score_log_probs", "top_ids", "top_log_probs")),
        *((name, ctypes.c_void_p) for name in ("logits", "hidden_out")),
        ("hidden_width", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("num_tokens", "num_chunks", "num_block_ids", "num_selected")),
        *(
            (name, ctypes.c_uint32)
            for name in ("num_kept", "num_samples", "num_scores", "num_sample_ids", "num_top", "num_mask_words")
        ),
    )
