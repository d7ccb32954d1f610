"""A step's tokens and places as they lie on the device: arrays of 32-bit integers, one behind the other.

rows: tokens of the step, filled up to the bucket that runs. Rows that stand for no token have slot -1. Where layers
with a window have block tables of their own, slots and block tables of all tables lie one behind the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from llmserve.engine.cuda.layout import EngineHeader
from llmserve.engine.native.records import num_words
from llmserve.scheduler.plan import UNSEEN, Chunk
from llmserve.scheduler.settings import NO_WINDOWS, WindowedLayers

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

    def __init__(self, header: EngineHeader, layers: WindowedLayers = NO_WINDOWS, zeros: int = 0) -> None:
        """`zeros`: the block whose numbers are 0, which stands where these layers have given one back."""
        self._header, self._layers, self._zeros = header, layers, zeros
        self._has_states = header.state_bytes > 0
        most, num_tables = header.max_num_tokens, 1 + layers.num_tables
        self._strides = {"slots": _aligned(most), "block_tables": _aligned(header.max_batch_size * header.max_blocks)}
        sizes = {
            "token_ids": most,
            "positions": most,
            "slots": num_tables * self._strides["slots"],
            "tiles": num_words(TILE) * max_tiles(header, most),
        }
        if self._has_states:
            sizes |= {"chunks": num_words(CHUNK) * max_tiles(header, most), "chunk_of_row": most}
        sizes["block_tables"] = num_tables * self._strides["block_tables"]  # the last: only what is used is copied
        self.offsets, self.num_bytes = arrays_behind(sizes)
        self._sizes = sizes

    def offset(self, name: str, table: int) -> int:
        """In bytes; of slots and block tables those of this table."""
        return self.offsets[name] + ITEM_BYTES * table * self._strides.get(name, 0)

    def views(self, memory: NDArray[np.uint8]) -> dict[str, NDArray[np.int32]]:
        items = memory[: self.num_bytes].view(np.int32)
        begins = {name: offset // ITEM_BYTES for name, offset in self.offsets.items()}
        found = {name: items[begin : begin + self._sizes[name]] for name, begin in begins.items()}
        return found | {name: found[name].reshape(-1, stride) for name, stride in self._strides.items()}

    def fill(
        self, views: dict[str, NDArray[np.int32]], chunks: Sequence[Chunk], num_rows: int, unseen: Mapping[int, int]
    ) -> list[slice]:
        """Write a step that is filled up to `num_rows`. Returns which bytes of it have to be copied.

        unseen: what stands for the token that the step before chooses for a sequence.
        """
        header, block_size = self._header, self._header.block_size
        tables, slots, tiles = views["block_tables"], views["slots"], views["tiles"].view(TILE)
        counts = [len(chunk.token_ids) for chunk in chunks]
        row = tile = 0
        for sequence, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
            end, begin = row + count, header.max_blocks * sequence
            tables[0, begin : begin + len(chunk.block_table)] = chunk.block_table
            if chunk.windowed:
                kept = self._layers.first_read(chunk.start) // block_size
                tables[1:, begin : begin + kept] = self._zeros
                tables[1:, begin + kept : begin + len(chunk.windowed[0])] = [each[kept:] for each in chunk.windowed]
            views["token_ids"][row:end] = chunk.token_ids
            if chunk.token_ids[-1] == UNSEEN:
                views["token_ids"][end - 1] = unseen[chunk.sequence_id]
            views["positions"][row:end] = np.arange(chunk.start, chunk.start + count)
            for first in range(0, count, header.query_tokens):
                tiles[tile] = row + first, min(header.query_tokens, count - first), sequence, chunk.start + first
                tile += 1
            row = end
        positions = views["positions"][:row]
        entries = np.repeat(header.max_blocks * np.arange(len(chunks)), counts) + positions // block_size
        slots[:, :row] = tables[:, entries] * block_size + positions % block_size
        views["token_ids"][row:num_rows] = 0
        views["positions"][row:num_rows] = 0
        slots[:, row:num_rows] = NO_SLOT
        tiles[tile : max_tiles(header, num_rows)] = 0
        if self._has_states:
            self._fill_chunks(views, chunks, num_rows)
        used = ITEM_BYTES * header.max_blocks * len(chunks)
        begins = (self.offset("block_tables", table) for table in range(len(tables)))
        return [slice(begin if table else 0, begin + used) for table, begin in enumerate(begins)]

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


def arrays_behind(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Places in bytes of arrays of so many 32-bit numbers, one behind the other, and what they take together."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += ITEM_BYTES * _aligned(size)
    return offsets, end


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
