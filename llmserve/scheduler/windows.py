"""Who owns the blocks of layers with a window: they hold what such layers can still read of a sequence, and no more.

All blocks come from one pool and are equally large. One has room for a part of the layers only: those without a window,
or as many of those with one. So a sequence has a table of blocks for the first, and `num_tables` tables for the others.
Entries of these before the window of the next token are given back and are not read again.

Each running sequence has been promised blocks for its window and for a small chunk behind it, under every policy. So it
never waits for one. It takes more where blocks are left, for larger chunks.

A prefix is found where its blocks are, and before its end those of a window. The key of such a block is the hash of the
tokens up to its end, and the number of its table.
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

GIVEN_BACK = 0  # an entry of a table that is not read


def windowed_keys(block_hash: bytes, num_tables: int) -> list[bytes]:
    """Of the blocks that hold layers with a window, where another one with this hash holds the rest."""
    return [block_hash + bytes((table,)) for table in range(num_tables)]


def keys_read(layers: WindowedLayers, hashes: Seq[bytes], block_size: int) -> list[bytes]:
    """Of blocks with a window that a token behind these reads; those of all tables at one place lie together."""
    if not layers.num_tables:
        return []
    read = hashes[layers.first_read(len(hashes) * block_size) // block_size :]
    return [key for block_hash in read for key in windowed_keys(block_hash, layers.num_tables)]


class Windowed(Protocol):
    """Of a sequence, what this module reads and writes."""

    block_table: array[int]
    windowed: tuple[array[int], ...]
    num_given_back: int

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def max_num_cached(self) -> int: ...


class WindowedBlocks:
    """Does nothing for a network without windows."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.pool = pool
        self._config = config
        self._layers = config.windowed_layers
        self._num_tables = config.windowed_layers.num_tables
        self._promised: dict[Windowed, int] = {}  # blocks that each running sequence may need beside those that it has
        self._num_promised = 0  # in all
        self._num_shared = 0  # owners of blocks beyond the first of each

    @property
    def num_promised(self) -> int:
        """Free blocks that running sequences may need here. A shared one does not become free with its first owner, so
        there must be another one."""
        return self._num_promised + self._num_shared

    def num_promised_to(self, running: Collection[Windowed]) -> int:
        """If only these ran."""
        if not self._num_tables:
            return 0
        owners = Counter(block for sequence in running for block in self._held(sequence))
        return owners.total() - len(owners) + sum(self._promised[sequence] for sequence in running)

    def num_needed(self, sequence: Windowed) -> int:
        """At a time, at most, unless blocks are left."""
        return self._config.num_windowed_blocks_for(sequence.max_num_cached) if self._num_tables else 0

    def longest(self, hashes: Seq[bytes], is_known: Callable[[bytes], bool] | None = None) -> int:
        """How many of these blocks, which are known, are of use: those of a window before their end are known, too.

        `is_known`: by its key; None: in the pool.
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
        """As `keys_read`."""
        return keys_read(self._layers, hashes, self._config.block_size)

    def num_used(self, hashes: Seq[bytes]) -> int:
        """Blocks that a sequence which begins with these would share with a running one."""
        return sum(map(self.pool.is_used, self._found(hashes)))

    def start(self, sequence: Windowed, hashes: Seq[bytes]) -> None:
        """It begins with these blocks, of which `longest` says that they are of use."""
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
        """That its next chunk may have. `num_left`: free blocks that nobody has been promised."""
        if sequence.num_pending <= self._layers.least_chunk or not self._num_tables:
            return sequence.num_pending
        num_blocks = len(sequence.windowed[0]) + (self._promised[sequence] + num_left()) // self._num_tables
        most = num_blocks * self._config.block_size - sequence.num_computed_tokens
        return min(sequence.num_pending, max(self._layers.least_chunk, most))

    def num_draftable(self, sequence: Sequence) -> int:
        """Tokens that its next chunk, which is planned, may have more."""
        pending = sequence.num_pending
        return max(0, self._layers.least_chunk - pending) if self._num_tables else sequence.num_draftable

    def prepare(self, sequence: Windowed, num_tokens: int) -> None:
        """Its next chunk has so many tokens."""
        end = self._config.num_blocks_for(sequence.num_computed_tokens + num_tokens)
        if num_missing := self.num_missing(sequence, end):
            blocks = self.pool.allocate(num_missing, counts=False)
            for number, table in enumerate(sequence.windowed):
                table.extend(blocks[number :: self._num_tables])
            self._recount(sequence)

    def num_missing(self, sequence: Windowed, num_blocks: int) -> int:
        """For tables of so many entries."""
        return max(0, num_blocks - len(sequence.windowed[0])) * self._num_tables if self._num_tables else 0

    def register(self, sequence: Windowed, index: int, block_hash: bytes) -> None:
        """The blocks at this place are full and computed."""
        for table, key in zip(sequence.windowed, windowed_keys(block_hash, self._num_tables), strict=True):
            self.pool.register(table[index], key)

    def advance(self, sequence: Windowed) -> None:
        """More has been computed: what the next token does not read is given back."""
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
        """Tables keep so many entries, at most."""
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
        """All of its blocks, in whatever table."""
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
        """The first block that a token behind so many reads."""
        return self._layers.first_read(num_blocks * self._config.block_size) // self._config.block_size

    def _found(self, hashes: Seq[bytes]) -> list[int]:
        return self.pool.match(self.keys(hashes))

    def _give_back(self, tables: Iterable[array[int]]) -> None:
        for blocks in tables:
            self.pool.release(blocks)
            self._num_shared -= sum(map(self.pool.is_used, blocks))
