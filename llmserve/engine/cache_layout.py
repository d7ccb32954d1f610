"""Which layers of an engine share a block, and which of a sequence's tables lists it (`scheduler/windows.py`).

All blocks have the same size. If layers have windows, a block has `num_parts` of them: the layers without a window, or
as many layers with one, which have their own tables. A layer with a window may also be treated as one without: that is
always correct, and may waste less memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from llmserve.scheduler.settings import NO_WINDOWS, WindowedLayers

MAX_TABLES = 16  # for layers with windows: each table is copied in every step
MOST_FILLED_UP = 9 / 8  # of the memory without windows: how much a short sequence may take


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """`places`: table and part of each layer; None: all share one table, and each has a part."""

    block_bytes: int
    places: Sequence[tuple[int, int]] = ()
    windowed_layers: WindowedLayers = NO_WINDOWS
    num_parts: int | None = None  # parts of a block; None: one for each layer

    @property
    def num_spare(self) -> int:
        """Blocks of zeros, which replace blocks that were released."""
        return int(self.windowed_layers.num_tables > 0)

    def place(self, layer: int) -> tuple[int, int]:
        return self.places[layer] if self.places else (0, layer)


@dataclass(frozen=True, slots=True)
class _Split:
    num_whole: int  # layers without a window, or treated so; a block has as many parts
    windowed: WindowedLayers

    def num_parts_for(self, num_tokens: int, block_size: int) -> int:
        """Parts of blocks that a sequence of so many tokens needs."""
        num_blocks = -(-num_tokens // block_size) + self.windowed.num_blocks_for(num_tokens, block_size)
        return self.num_whole * num_blocks


def cache_layout(
    reads: Iterable[tuple[int, int]], num_layers: int, block_bytes: int, max_seq_len: int, block_size: int
) -> CacheLayout:
    """The layout with the least memory for the longest sequence. Networks without windows do not depend on it.

    reads: layer and window (0: none) of each operation that reads a cache; none: layers keep all blocks. block_bytes:
    of all layers, which are equally large where some have windows; block_size: tokens.
    """
    windows = longest_windows(reads, max_seq_len)
    split = best_split(sorted(windows.values()), max_seq_len, block_size)
    if split is None:
        return CacheLayout(block_bytes)
    found = [(0, 0)] * num_layers
    for place, layer in enumerate(sorted(windows, key=lambda layer: (-windows[layer], layer))):
        found[layer] = divmod(place, split.num_whole)
    return CacheLayout(split.num_whole * (block_bytes // num_layers), tuple(found), split.windowed, split.num_whole)


def longest_windows(reads: Iterable[tuple[int, int]], max_seq_len: int) -> Mapping[int, int]:
    """Returns by layer the largest number of positions that any operation reads back."""
    windows: dict[int, int] = {}
    for layer, window in reads:
        windows[int(layer)] = max(windows.get(int(layer), 0), min(int(window) or max_seq_len, max_seq_len))
    return windows


def best_split(windows: Sequence[int], max_seq_len: int, block_size: int) -> _Split | None:
    """Split layers with these windows, in ascending order. None: it is best if all share one table."""
    num_now = len(windows) * -(-max_seq_len // block_size)
    splits = (
        split
        for split in _splits(windows, max_seq_len)
        if (1 + split.windowed.num_tables) * split.num_whole <= MOST_FILLED_UP * len(windows)
        and split.num_parts_for(max_seq_len, block_size) < num_now
    )
    return min(splits, key=lambda split: split.num_parts_for(max_seq_len, block_size), default=None)


def _splits(windows: Sequence[int], max_seq_len: int) -> Iterator[_Split]:
    for num_windowed in range(1, len(windows)):
        num_whole, window = len(windows) - num_windowed, windows[num_windowed - 1]
        num_tables = -(-num_windowed // num_whole)
        if window < max_seq_len and num_tables <= MAX_TABLES:
            yield _Split(num_whole, WindowedLayers(window, num_tables))
