"""Word lists in the format of TensorRT-LLM's tensors: int32 `[2, N]`.

Row 0 has the ids of all words, one after the other, padded with 0; row 1 has the end offset of each word, padded with
-1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from llmserve.errors import InvalidArgument

MAX_COLUMNS = 64 * 1024  # more ids than engines accept in words


def pack_word_list(words: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """`[2, N]`; `[2, 0]` without words. Words without ids are skipped."""
    kept = [word for word in words if word]
    ids = [token for word in kept for token in word]
    packed = np.full((2, len(ids)), -1, np.int32)
    packed[0] = ids
    packed[1, : len(kept)] = np.cumsum([len(word) for word in kept])
    return packed


def pack_word_lists(lists: Sequence[Sequence[Sequence[int]]]) -> NDArray[np.int32]:
    """`[B, 2, N]` for the words of each row of a batch."""
    packed = [pack_word_list(words) for words in lists]
    if len(packed) == 1:
        return packed[0][None]
    batch = np.zeros((len(packed), 2, max(each.shape[1] for each in packed)), np.int32)
    batch[:, 1] = -1
    for row, each in zip(batch, packed, strict=True):
        row[:, : each.shape[1]] = each
    return batch


def unpack_word_list(array: NDArray[np.int32], name: str) -> tuple[tuple[int, ...], ...]:
    """Words of a `[2, N]` or `[1, 2, N]` array. `name` is the tensor's, for errors."""
    rows = array[0] if array.ndim == 3 and array.shape[0] == 1 else array
    if rows.ndim != 2 or rows.shape[0] != 2:
        raise InvalidArgument(f"{name} must have shape [1, 2, N], got {list(array.shape)}")
    if rows.shape[1] > MAX_COLUMNS:
        raise InvalidArgument(f"{name} has {rows.shape[1]} columns, more than {MAX_COLUMNS}")
    ends = [int(end) for end in rows[1] if end > 0]
    if ends != sorted(set(ends)) or (ends and ends[-1] > rows.shape[1]):
        raise InvalidArgument(f"{name}: row 1 must hold rising end offsets up to {rows.shape[1]}")
    return tuple(tuple(rows[0, start:end].tolist()) for start, end in pairwise([0, *ends]))
