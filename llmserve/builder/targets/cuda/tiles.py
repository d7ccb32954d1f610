"""Shapes of tiles, and how sums are divided.

Results depend on a weight's segments, with the inputs of a tile, and on the segment and tiles of attention; the network
alone determines these. Tiles over rows and columns of a product, warps and stages may be chosen freely: a tile of sums
is [columns, rows], four warps share an instruction over 64 columns, and its bits do not depend on its number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from llmserve.models.number_formats import FLOATS

MANY = 1 << 30
SPLIT_ROWS = 256  # for at most so many rows, separate programs may process segments of a sum
MOST_SEGMENTS = 16
MOST_SUMS_TWICE = 64  # per thread: more do not fit next to as many others
FEW_SUMS_TWICE = 32  # with more, the registers of a multiprocessor suffice for one program only
LEAST_COLUMNS = 64  # of an instruction of four warps


@dataclass(frozen=True, slots=True)
class ProductTile:
    rows: int
    columns: int
    num_warps: int
    num_stages: int

    @property
    def sums(self) -> int:
        """Sums per thread."""
        return self.rows * self.columns // (32 * self.num_warps)


class RowRange(NamedTuple):
    """How a product of so many rows is divided by default, and the alternatives."""

    rows: tuple[int, int]
    tile: ProductTile
    others: tuple[ProductTile, ...] = ()  # alternatives to try
    in_words: bool = False  # for few rows: integers without matrix instructions

    def is_split(self, num_columns: int, segments: int, programs: int) -> bool:
        """Whether separate programs process segments, because there would be too few programs otherwise."""
        least, most = self.rows
        # by the smallest number of rows in a bucket of this range; the previous bucket has half as many
        others = -(-num_columns // self.tile.columns) * -(-max(least, most // 2) // self.tile.rows)
        return self.in_words or (segments > 1 and most <= SPLIT_ROWS and others < programs)

    def fitting(self, segments: int) -> RowRange:
        """A copy without tiles whose sums of one segment do not fit in registers next to the sums of all segments;
        small tiles come first."""
        if segments == 1:
            return self
        tiles = (self.tile, *self.others)
        fitting = [tile for tile in tiles if tile.sums <= MOST_SUMS_TWICE] or tiles
        first, *others = sorted(fitting, key=lambda tile: tile.sums > FEW_SUMS_TWICE)
        return self._replace(tile=first, others=tuple(others))


@dataclass(frozen=True, slots=True)
class Tiles:
    floats: tuple[RowRange, ...]  # of products, by rows
    integers: tuple[RowRange, ...]
    inputs: int = 64  # inputs in a tile of a product; segments end at a tile, so all tiles have the same number
    queries: int = 64
    keys: int = 64
    segment: int = 512  # positions
    columns: int = 1024  # columns in a tile of ops on each row
    numbers: int = 2048  # of several heads of a row
    choice: int = 2048  # tokens of a vocabulary
    programs: int = 192  # requested, for products of floats with few rows
    warps: int = 2048  # requested, for products of integers with few rows
    least_inputs: int = 256  # of a segment
    has_choice: bool = True  # whether there are alternatives to measure

    def ranges(self, *, of_integers: bool) -> tuple[RowRange, ...]:
        return self.integers if of_integers else self.floats

    def up_to(self, rows: int) -> Tiles:
        """Ranges that steps of so many rows use."""
        floats, integers = (tuple(r for r in ranges if r.rows[0] <= rows) for ranges in (self.floats, self.integers))
        return replace(self, floats=floats, integers=integers)

    def segments(self, num_columns: int, num_inputs: int, *, of_integers: bool) -> int:
        """Inputs per segment of a weight's sums, such that few rows keep the device busy."""
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
        """Heads of a row in a tile, each `width` wide; a power of two."""
        return min(1 << (count - 1).bit_length(), max(1, self.numbers // width))


def by_rows(*ranges: tuple[int, tuple[ProductTile, ...]], in_words: bool = False) -> Iterator[RowRange]:
    """Ranges of these tiles, each up to so many rows: the first tile unless tuning finds a faster one."""
    least = 1
    for most, (tile, *others) in ranges:
        yield RowRange((least, most), tile, tuple(others), in_words)
        least = most + 1


def tiles_for(dtype: str) -> Tiles:
    words = ((rows, (ProductTile(rows, 128, 4, 1), ProductTile(rows, 64, 2, 1))) for rows in (1, 4))
    integers = (
        *by_rows(*words, in_words=True),
        RowRange((5, 8), ProductTile(8, 128, 4, 4), (ProductTile(8, 256, 4, 3),)),
        RowRange((9, 16), ProductTile(16, 128, 4, 3), (ProductTile(16, 256, 4, 3),)),
        RowRange((17, 32), ProductTile(32, 128, 4, 3), (ProductTile(32, 64, 4, 4),)),
        RowRange((33, 128), ProductTile(64, 64, 4, 4), (ProductTile(64, 128, 4, 3),)),
        RowRange((129, MANY), ProductTile(64, 64, 4, 4), (ProductTile(64, 128, 4, 3), ProductTile(128, 64, 4, 3))),
    )
    if FLOATS[dtype].bits == 32:
        floats = by_rows((64, (ProductTile(64, 32, 4, 3),)), (MANY, (ProductTile(64, 64, 4, 3),)))
        return Tiles(tuple(floats), integers, inputs=32, queries=32, keys=32)
    many = ProductTile(128, 128, 8, 3), ProductTile(128, 128, 4, 3), ProductTile(128, 64, 8, 4)
    floats = by_rows(
        (8, (ProductTile(8, 64, 4, 6), ProductTile(8, 128, 4, 4))),
        (16, (ProductTile(16, 64, 4, 6), ProductTile(16, 128, 4, 4))),
        (64, (ProductTile(64, 64, 4, 4), ProductTile(64, 128, 4, 4))),
        (128, (ProductTile(128, 64, 4, 4), ProductTile(128, 128, 8, 3))),
        (256, many),
        (MANY, many),
    )
    return Tiles(tuple(floats), integers)


def without_choice(tiles: Tiles) -> Tiles:
    return replace(tiles, has_choice=False)
