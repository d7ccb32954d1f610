"""Ownership of the blocks of sliding-window layers, which contain only what these layers can still read.

All blocks come from one pool and have the same size. A block contains only some of the layers: all those without a
window, or as many of those with a window. So a sequence has one table of blocks for the layers without a window, and
`num_tables` tables for the others. Blocks before the window of the next token are released and not read again.

Under every policy, each running sequence is promised blocks for its window and a small chunk after it, so it never
waits for one. It takes more for larger chunks if blocks are free.

A prefix can be reused if its blocks are known, and the window blocks before its end. The key of a window block is the
hash of the tokens up to its end, and the number of its table.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import chain
from typing import Protocol

from llmserve.scheduler.blocks import BlockPool
from llmserve.scheduler.sequence import Sequence
from llmserve.scheduler.settings import SchedulerConfig, WindowedLayers

GIVEN_BACK = 0  # table entry of a released block; never read


def windowed_keys(block_hash: bytes, num_tables: int) -> list[bytes]:
    """Keys of the window blocks that belong to the block with this hash."""
    return [block_hash + bytes((table,)) for table in range(num_tables)]


def keys_read(layers: WindowedLayers, hashes: Seq[bytes], block_size: int) -> list[bytes]:
    """Keys of the window blocks that the token after these blocks reads; ordered by position, then by table."""
    if not layers.num_tables:
        return []
    read = hashes[layers.first_read(len(hashes) * block_size) // block_size :]
    return [key for block_hash in read for key in windowed_keys(block_hash, layers.num_tables)]


class Windowed(Protocol):
    """The attributes of a sequence that this module uses."""

    block_table: array[int]
    windowed: tuple[array[int], ...]
    num_given_back: int

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def max_num_cached(self) -> int: ...


class WindowedBlocks:
    """Owns the window blocks. Does nothing for a network without windows."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.pool = pool
        self._config = config
        self._layers = config.windowed_layers
        self._num_tables = config.windowed_layers.num_tables
        self._promised: dict[Windowed, int] = {}  # blocks that each running sequence may still need
        self._num_promised = 0  # their sum
        self._num_shared = 0  # owners of blocks, without the first owner of each

    @property
    def num_promised(self) -> int:
        """Free blocks that running sequences may need. A shared block does not become free with its first owner, so
        each further owner needs a free one."""
        return self._num_promised + self._num_shared

    def num_promised_to(self, running: Collection[Windowed]) -> int:
        """`num_promised` if only these sequences ran."""
        if not self._num_tables:
            return 0
        owners = Counter(block for sequence in running for block in self._held(sequence))
        return owners.total() - len(owners) + sum(self._promised[sequence] for sequence in running)

    def num_needed(self, sequence: Windowed) -> int:
        """Blocks that a sequence is promised at a time."""
        return self._config.num_windowed_blocks_for(sequence.max_num_cached) if self._num_tables else 0

    def longest(self, hashes: Seq[bytes], is_known: Callable[[bytes], bool] | None = None) -> int:
        """How many of these known blocks can be reused, because the window blocks before their end are known, too.

        `is_known`: whether a window block is known, by its key; None: look in the pool.
        """
        if not self._num_tables:
            return len(hashes)
        is_known = is_known or self.pool.has
        count = index = len(hashes)
        while index > self._first_read(count):
            index -= 1
            if not all(map(is_known, windowed_keys(hashes[index], self._num_tables))):
                count = index
        return count

    def keys(self, hashes: Seq[bytes]) -> list[bytes]:
        """See `keys_read`."""
        return keys_read(self._layers, hashes, self._config.block_size)

    def num_used(self, hashes: Seq[bytes]) -> int:
        """Number of window blocks that a sequence with this prefix would share with a running one."""
        return sum(map(self.pool.is_used, self._found(hashes)))

    def start(self, sequence: Windowed, hashes: Seq[bytes]) -> None:
        """Give the sequence the window blocks of its reused prefix, whose length `longest` has checked."""
        if not self._num_tables:
            return
        self._num_shared += self.num_used(hashes)
        found = self._found(hashes)
        self.pool.acquire(found, counts=False)
        first = self._first_read(len(hashes))
        before = array("i", [GIVEN_BACK]) * first
        sequence.windowed = tuple(before + array("i", found[table :: self._num_tables]) for table in self._tables)
        sequence.num_given_back = first
        self._recount(sequence)

    def most_tokens(self, sequence: Sequence, num_left: Callable[[], int]) -> int:
        """The most tokens of its next chunk. `num_left`: number of free blocks that are not promised."""
        if sequence.num_pending <= self._layers.least_chunk or not self._num_tables:
            return sequence.num_pending
        num_blocks = len(sequence.windowed[0]) + (self._promised[sequence] + num_left()) // self._num_tables
        most = num_blocks * self._config.block_size - sequence.num_computed_tokens
        return min(sequence.num_pending, max(self._layers.least_chunk, most))

    def num_draftable(self, sequence: Sequence) -> int:
        """Number of tokens that can be added to its planned chunk."""
        pending = sequence.num_pending
        return max(0, self._layers.least_chunk - pending) if self._num_tables else sequence.num_draftable

    def prepare(self, sequence: Windowed, num_tokens: int) -> None:
        """Allocate the blocks for a chunk of `num_tokens` tokens."""
        end = self._config.num_blocks_for(sequence.num_computed_tokens + num_tokens)
        if num_missing := self.num_missing(sequence, end):
            blocks = self.pool.allocate(num_missing, counts=False)
            for number, table in enumerate(sequence.windowed):
                table.extend(blocks[number :: self._num_tables])
            self._recount(sequence)

    def num_missing(self, sequence: Windowed, num_blocks: int) -> int:
        """Number of blocks missing for tables of `num_blocks` entries."""
        return max(0, num_blocks - len(sequence.windowed[0])) * self._num_tables if self._num_tables else 0

    def register(self, sequence: Windowed, index: int, block_hash: bytes) -> None:
        """Make the blocks at this index, which are full and computed, available to others."""
        for table, key in zip(sequence.windowed, windowed_keys(block_hash, self._num_tables), strict=True):
            self.pool.register(table[index], key)

    def advance(self, sequence: Windowed) -> None:
        """Release the blocks that the next token does not read."""
        if not self._num_tables:
            return
        begin, end = sequence.num_given_back, self._layers.first_read(sequence.num_computed_tokens)
        end //= self._config.block_size
        if begin < end:
            self._give_back(table[begin:end] for table in sequence.windowed)
            for table in sequence.windowed:
                table[begin:end] = array("i", [GIVEN_BACK]) * (end - begin)
            sequence.num_given_back = end
            self._recount(sequence)

    def shorten(self, sequence: Windowed, num_blocks: int) -> None:
        """Cut tables to `num_blocks` entries."""
        if not (sequence.windowed and len(sequence.windowed[0]) > num_blocks):
            return
        self._give_back(table[num_blocks:] for table in sequence.windowed)
        for table in sequence.windowed:
            del table[num_blocks:]
        self._recount(sequence)

    def release(self, sequence: Windowed) -> None:
        self._give_back(table[sequence.num_given_back :] for table in sequence.windowed)
        self._num_promised -= self._promised.pop(sequence, 0)
        sequence.windowed, sequence.num_given_back = (), 0

    def owned(self, sequence: Windowed) -> list[int]:
        """All of its blocks, in all tables."""
        return [*sequence.block_table, *self._held(sequence)]

    def check_integrity(self, running: Iterable[Windowed]) -> None:
        if not self._num_tables:
            return
        assert self._promised.keys() == set(running), "windows of others than the running sequences"
        assert self._num_promised == sum(self._promised.values()), "promised blocks are counted wrongly"
        assert self.num_promised == self.num_promised_to(self._promised), "shared blocks are counted wrongly"
        for sequence in self._promised:
            assert len({len(table) for table in sequence.windowed}) == 1, "tables differ in their length"
            first_read = self._layers.first_read(sequence.num_computed_tokens)
            assert sequence.num_given_back == first_read // self._config.block_size, "a window has lost its blocks"

    @property
    def _tables(self) -> range:
        return range(self._num_tables)

    def _held(self, sequence: Windowed) -> Iterator[int]:
        return chain.from_iterable(table[sequence.num_given_back :] for table in sequence.windowed)

    def _recount(self, sequence: Windowed) -> None:
        num_held = (len(sequence.windowed[0]) - sequence.num_given_back) * self._num_tables
        num_promised = max(0, self.num_needed(sequence) - num_held)
        self._num_promised += num_promised - self._promised.get(sequence, 0)
        self._promised[sequence] = num_promised

    def _first_read(self, num_blocks: int) -> int:
        """The first block that the token after `num_blocks` blocks reads."""
        return self._layers.first_read(num_blocks * self._config.block_size) // self._config.block_size

    def _found(self, hashes: Seq[bytes]) -> list[int]:
        return self.pool.match(self.keys(hashes))

    def _give_back(self, tables: Iterable[array[int]]) -> None:
        for blocks in tables:
            self.pool.release(blocks)
            self._num_shared -= sum(map(self.pool.is_used, blocks))
