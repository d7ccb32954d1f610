"""Shapes of tiles, and how sums are divided.

What decides a result is a weight's segments, with the inputs of a tile, and the segment and tiles of attention: they
follow from the network alone. Tiles over rows and columns of a product, warps and stages are free: a tile of sums is
[columns, rows], four warps share an instruction over 64 columns, and its bits do not depend on how many rows it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from llmserve.models.number_formats import FLOATS

MANY = 1 << 30
SPLIT_ROWS = 128  # up to so many rows, segments of a sum may be worked off by several programs
MOST_SEGMENTS = 16
MOST_SUMS_TWICE = 64  # of a thread: more do not fit beside as many others
LEAST_COLUMNS = 64  # of four warps' instruction


@dataclass(frozen=True, slots=True)
class ProductTile:
    rows: int
    columns: int
    num_warps: int
    num_stages: int

    @property
    def sums(self) -> int:
        """Of a thread."""
        return self.rows * self.columns // (32 * self.num_warps)


class RowRange(NamedTuple):
    """How a product of so many rows is cut, if nobody has tuned it, and how else it may be."""

    rows: tuple[int, int]
    tile: ProductTile
    others: tuple[ProductTile, ...] = ()  # to be tried
    in_words: bool = False  # integers without matrix instructions: for few rows

    def is_split(self, num_columns: int, segments: int, programs: int) -> bool:
        """Whether segments are worked off by programs of their own: where there would be too few others."""
        least, most = self.rows
        # by the rows that a bucket of this range has at least: the one before it has half as many
        others = -(-num_columns // self.tile.columns) * -(-max(least, most // 2) // self.tile.rows)
        return self.in_words or (segments > 1 and most <= SPLIT_ROWS and others < programs)

    def fitting(self, segments: int) -> RowRange:
        """Without tiles that have no registers for the sums of a run beside those of all runs."""
        tiles = (self.tile, *self.others)
        first, *others = [tile for tile in tiles if segments == 1 or tile.sums <= MOST_SUMS_TWICE] or tiles
        return self._replace(tile=first, others=tuple(others))


@dataclass(frozen=True, slots=True)
class Tiles:
    floats: tuple[RowRange, ...]  # of products, by rows
    integers: tuple[RowRange, ...]
    inputs: int = 64  # of a tile of a product: where segments end follows from it, so all tiles have the same
    queries: int = 64
    keys: int = 64
    segment: int = 512  # positions
    columns: int = 1024  # of what is done to each row by itself
    numbers: int = 2048  # of several heads of a row
    choice: int = 2048  # tokens of a vocabulary
    programs: int = 192  # wanted, of products of floats for few rows
    warps: int = 2048  # wanted, of products of integers for few rows
    least_inputs: int = 256  # of a segment
    has_choice: bool = True  # whether there is something to tune

    def ranges(self, *, of_integers: bool) -> tuple[RowRange, ...]:
        return self.integers if of_integers else self.floats

    def up_to(self, rows: int) -> Tiles:
        """Those that steps of so many rows use."""
        floats, integers = (tuple(r for r in ranges if r.rows[0] <= rows) for ranges in (self.floats, self.integers))
        return replace(self, floats=floats, integers=integers)

    def segments(self, num_columns: int, num_inputs: int, *, of_integers: bool) -> int:
        """Of the sums of a weight: so many that few rows keep the device busy."""
        columns, wanted = (32, self.warps) if of_integers else (LEAST_COLUMNS, self.programs)
        segments = 1
        while (
            segments < MOST_SEGMENTS
            and -(-num_columns // columns) * segments < wanted
            and num_inputs >= 2 * segments * self.least_inputs
        ):
            segments *= 2
        return segments

    def heads(self, count: int, width: int) -> int:
        """Heads of a row in a tile, each `width` wide: a power of two."""
        return min(1 << (count - 1).bit_length(), max(1, self.numbers // width))


def by_rows(*ranges: tuple[int, tuple[ProductTile, ...]], in_words: bool = False) -> Iterator[RowRange]:
    """One behind the other, up to so many rows each, of these tiles: the first unless others are faster."""
    least = 1
    for most, (tile, *others) in ranges:
        yield RowRange((least, most), tile, tuple(others), in_words)
        least = most + 1


def tiles_for(dtype: str) -> Tiles:
    words = by_rows(
        *((rows, (ProductTile(rows, 128, 4, 1), ProductTile(rows, 64, 2, 1))) for rows in (1, 4, 8)),
        (32, (ProductTile(8, 128, 4, 1), ProductTile(4, 128, 4, 1))),
        in_words=True,
    )
    integers = (
        *words,
        RowRange((33, 64), ProductTile(64, 64, 4, 4), (ProductTile(64, 128, 4, 3),)),
        RowRange((65, MANY), ProductTile(64, 64, 4, 4), (ProductTile(64, 128, 4, 3), ProductTile(128, 128, 8, 3))),
    )
    if FLOATS[dtype].bits == 32:
        floats = by_rows((64, (ProductTile(64, 32, 4, 3),)), (MANY, (ProductTile(64, 64, 4, 3),)))
        return Tiles(tuple(floats), integers, inputs=32, queries=32, keys=32)
    floats = by_rows(
        (8, (ProductTile(8, 64, 4, 6), ProductTile(8, 128, 4, 4))),
        (16, (ProductTile(16, 64, 4, 6), ProductTile(16, 128, 4, 4))),
        (64, (ProductTile(64, 64, 4, 4), ProductTile(64, 128, 4, 4))),
        (128, (ProductTile(128, 64, 4, 4), ProductTile(128, 128, 8, 3))),
        (MANY, (ProductTile(128, 128, 8, 3), ProductTile(128, 128, 4, 3))),
    )
    return Tiles(tuple(floats), integers)


def without_choice(tiles: Tiles) -> Tiles:
    return replace(tiles, has_choice=False)
