"""Shapes of tiles, and how sums are divided.

What decides a result is a weight's segments, with the inputs of a tile, and the segment and tiles of attention: they
follow from the network alone. Tiles over rows and columns of a product, warps and stages are free: those that are
tried on a device (`llmserve tune`) keep to one family of instructions, so to 64 rows or more for four warps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from llmserve.models.number_formats import FLOATS

SPLIT_ROWS = 64  # up to so many rows, segments of a sum are worked off by several programs
FEW_ROWS, MANY_ROWS = (1, SPLIT_ROWS), (SPLIT_ROWS + 1, 1 << 30)
MOST_SEGMENTS = 8


@dataclass(frozen=True, slots=True)
class ProductTile:
    rows: int
    columns: int
    num_warps: int
    num_stages: int


class RowRange(NamedTuple):
    """How a product of so many rows is cut, if nobody has tuned it, and how else it may be."""

    rows: tuple[int, int]
    tile: ProductTile
    others: tuple[ProductTile, ...]


@dataclass(frozen=True, slots=True)
class Tiles:
    """`few` rows are up to SPLIT_ROWS."""

    few: ProductTile
    many: ProductTile
    few_integers: ProductTile = ProductTile(64, 32, 4, 4)
    many_integers: ProductTile = ProductTile(128, 64, 8, 3)
    inputs: int = 64  # of a tile of a product: where segments end follows from it, so all tiles have the same
    queries: int = 64
    keys: int = 64
    segment: int = 512  # positions
    columns: int = 1024  # of what is done to each row by itself
    numbers: int = 2048  # of several heads of a row
    choice: int = 2048  # tokens of a vocabulary
    programs: int = 128  # wanted: about as many as large GPUs have multiprocessors
    least_inputs: int = 512  # of a segment
    more_few: tuple[ProductTile, ...] = ()  # to be tried beside `few`, and so on
    more_many: tuple[ProductTile, ...] = ()
    more_few_integers: tuple[ProductTile, ...] = ()
    more_many_integers: tuple[ProductTile, ...] = ()

    def ranges(self, *, of_integers: bool) -> tuple[RowRange, RowRange]:
        if of_integers:
            few = RowRange(FEW_ROWS, self.few_integers, self.more_few_integers)
            return few, RowRange(MANY_ROWS, self.many_integers, self.more_many_integers)
        few = RowRange(FEW_ROWS, self.few, self.more_few)
        return few, RowRange(MANY_ROWS, self.many, self.more_many)

    def segments(self, num_columns: int, num_inputs: int) -> int:
        """Of the sums of a weight: so many that few rows keep the device busy."""
        segments = 1
        while (
            segments < MOST_SEGMENTS
            and -(-num_columns // self.few.columns) * segments < self.programs
            and num_inputs >= 2 * segments * self.least_inputs
        ):
            segments *= 2
        return segments

    def heads(self, count: int, width: int) -> int:
        """Heads of a row in a tile, each `width` wide: a power of two."""
        return min(1 << (count - 1).bit_length(), max(1, self.numbers // width))


def tiles_for(dtype: str) -> Tiles:
    if FLOATS[dtype].bits == 32:
        return Tiles(ProductTile(64, 32, 4, 3), ProductTile(64, 64, 4, 3), inputs=32, queries=32, keys=32)
    return Tiles(
        ProductTile(64, 32, 4, 4), ProductTile(128, 128, 8, 3),
        more_few=(ProductTile(64, 16, 4, 6), ProductTile(64, 64, 4, 4)),
        more_many=(ProductTile(64, 128, 4, 3), ProductTile(128, 64, 4, 3)),
        more_few_integers=(ProductTile(64, 32, 4, 6), ProductTile(64, 64, 4, 3)),
        more_many_integers=(ProductTile(64, 64, 4, 3), ProductTile(128, 32, 4, 4)),
    )  # fmt: skip


def without_choice(tiles: Tiles) -> Tiles:
    """Nothing to be tried."""
    return replace(tiles, more_few=(), more_many=(), more_few_integers=(), more_many_integers=())
