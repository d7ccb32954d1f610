"""A step's tokens and places as they lie on the device: arrays of 32-bit integers, one behind the other.

rows: tokens of the step, filled up to the bucket that runs. Rows that stand for no token have slot -1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from llmserve.engine.cuda.layout import EngineHeader
from llmserve.engine.native.records import num_words
from llmserve.scheduler.plan import UNSEEN, Chunk

ITEM_BYTES = 4
ALIGNMENT = 64  # items
NO_SLOT = -1
BUCKET_ROWS = 128
FIRST_UNSEEN = -1  # stands for the first token that the step before chooses, -2 for the second
# Tokens of one sequence that a program of attention takes; start: position of the first one
TILE = np.dtype([(name, "i4") for name in ("first_row", "num_tokens", "sequence", "start")])
# Tokens of one sequence, with the slots of its state before them, behind them, and behind the first `num_kept`
CHUNK = np.dtype([(name, "i4") for name in ("first_row", "num_tokens", "before", "after", "kept", "num_kept")])


def buckets(most: int) -> list[int]:
    """Numbers of rows that a step is filled up to: powers of two up to BUCKET_ROWS, multiples of it, and `most`."""
    powers = [1 << bit for bit in range(BUCKET_ROWS.bit_length())]
    return [*(rows for rows in (*powers, *range(2 * BUCKET_ROWS, most, BUCKET_ROWS)) if rows < most), most]


def bucket_of(num_rows: int, most: int) -> int:
    full = 1 << (num_rows - 1).bit_length() if num_rows <= BUCKET_ROWS else -(-num_rows // BUCKET_ROWS) * BUCKET_ROWS
    return min(full, most)


def max_tiles(header: EngineHeader, num_rows: int) -> int:
    """Tiles of attention that so many rows may need: every sequence has one that is not full."""
    return min(num_rows, num_rows // header.query_tokens + header.max_batch_size)


class Inputs:
    """Places of the arrays, and their values in `memory`, which the device copies from."""

    def __init__(self, header: EngineHeader) -> None:
        self._header = header
        self._has_states = header.state_bytes > 0
        most = header.max_num_tokens
        sizes = {
            "token_ids": most,
            "positions": most,
            "slots": most,
            "tiles": num_words(TILE) * max_tiles(header, most),
        }
        if self._has_states:
            sizes |= {"chunks": num_words(CHUNK) * max_tiles(header, most), "chunk_of_row": most}
        sizes["block_tables"] = header.max_batch_size * header.max_blocks  # the last: only what is used is copied
        self.offsets: dict[str, int] = {}  # bytes
        end = 0
        for name, size in sizes.items():
            self.offsets[name] = end * ITEM_BYTES
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.num_bytes = end * ITEM_BYTES
        self._sizes = sizes

    def views(self, memory: NDArray[np.uint8]) -> dict[str, NDArray[np.int32]]:
        items = memory[: self.num_bytes].view(np.int32)
        begins = {name: offset // ITEM_BYTES for name, offset in self.offsets.items()}
        return {name: items[begin : begin + self._sizes[name]] for name, begin in begins.items()}

    def fill(
        self, views: dict[str, NDArray[np.int32]], chunks: Sequence[Chunk], num_rows: int, unseen: Mapping[int, int]
    ) -> int:
        """Write a step that is filled up to `num_rows`. Returns how many bytes of it have to be copied.

        unseen: what stands for the token that the step before chooses for a sequence.
        """
        header, block_size = self._header, self._header.block_size
        tables = views["block_tables"].reshape(-1, header.max_blocks)
        tiles = views["tiles"].view(TILE)
        row = tile = 0
        for sequence, chunk in enumerate(chunks):
            count = len(chunk.token_ids)
            end = row + count
            tables[sequence, : len(chunk.block_table)] = chunk.block_table
            positions = np.arange(chunk.start, chunk.start + count, dtype=np.int32)
            views["token_ids"][row:end] = chunk.token_ids
            if chunk.token_ids[-1] == UNSEEN:
                views["token_ids"][end - 1] = unseen[chunk.sequence_id]
            views["positions"][row:end] = positions
            views["slots"][row:end] = tables[sequence, positions // block_size] * block_size + positions % block_size
            for first in range(0, count, header.query_tokens):
                tiles[tile] = row + first, min(header.query_tokens, count - first), sequence, chunk.start + first
                tile += 1
            row = end
        views["token_ids"][row:num_rows] = 0
        views["positions"][row:num_rows] = 0
        views["slots"][row:num_rows] = NO_SLOT
        tiles[tile : max_tiles(header, num_rows)] = 0
        if self._has_states:
            self._fill_chunks(views, chunks, num_rows)
        return self.offsets["block_tables"] + ITEM_BYTES * header.max_blocks * len(chunks)

    def _fill_chunks(self, views: dict[str, NDArray[np.int32]], chunks: Sequence[Chunk], num_rows: int) -> None:
        """Which slots each sequence reads and writes."""
        records, chunk_of_row = views["chunks"].view(CHUNK), views["chunk_of_row"]
        row = 0
        for number, chunk in enumerate(chunks):
            (before, after), (kept, num_kept) = chunk.states, chunk.kept_state
            count = len(chunk.token_ids)
            records[number] = row, count, before if chunk.start else NO_SLOT, after, kept, num_kept
            chunk_of_row[row : row + count] = number
            row += count
        chunk_of_row[row:num_rows] = NO_SLOT
        records[len(chunks) : max_tiles(self._header, num_rows)] = 0
