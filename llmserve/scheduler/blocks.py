"""Ownership of KV blocks. Blocks are ints here; the runner stores their contents.

A block is used (one or more sequences refer to it) or free. A full block keeps the hash of its content when it becomes
free, so that a later prompt with the same prefix can reuse it. Free blocks are allocated least recently used first.

Blocks are found by a chained SHA-256 of (parent hash, token ids). A short hash would need a comparison of token ids for
the whole chain up to the root, because the same ids after another prefix have another content. With a cryptographic
hash, equal hashes mean equal contents, even if somebody chooses prompts that should collide.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence, Set
from typing import Protocol

ROOT_HASH = b""


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block that follows `parent`. The root hash covers what else changes content (adapter, salt)."""
    return hashlib.sha256(len(parent).to_bytes(4, "little") + parent + array("q", token_ids).tobytes()).digest()


def root_hash(adapter: str) -> bytes:
    """Parent hash of the first block of a sequence computed with this adapter; empty: no adapter."""
    return f"adapter {adapter}".encode() if adapter else ROOT_HASH


class BlockListener(Protocol):
    """Is told which block hashes can be found, and which no longer can. Called by the planning thread: must be fast."""

    def stored(self, block_hash: bytes, parent: bytes, token_ids: Sequence[int]) -> None: ...

    def removed(self, block_hash: bytes) -> None: ...


class BlockPool:
    """Owns `num_blocks` blocks. Each is free, or one or more block tables refer to it."""

    def __init__(self, num_blocks: int, listener: BlockListener | None = None) -> None:
        self.num_blocks = num_blocks
        self._listener = listener
        self.num_reused = 0  # blocks found by hash, since the start
        self.num_missed = 0  # blocks that had to be computed, since the start
        self._ref_counts: dict[int, int] = {}  # used blocks only
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # first: allocated next
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._unheard: set[bytes] = set()  # known hashes that listeners are not told
        self._evicted: list[tuple[int, bytes]] | None = None

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._ref_counts)

    @property
    def has_blank(self) -> bool:
        """Whether there is a free block without reusable content."""
        return bool(self._free) and next(iter(self._free)) not in self._hash_of

    @property
    def has_listener(self) -> bool:
        return self._listener is not None

    def known_hashes(self) -> Set[bytes]:
        """Hashes that can be found and that listeners have been told."""
        return self._block_of.keys() - self._unheard

    def known_blocks(self) -> list[tuple[bytes, int]]:
        """Every known hash and its block, in the order of future allocation; used blocks last."""
        found = ((self._hash_of.get(block), block) for block in (*self._free, *self._ref_counts))
        return [(block_hash, block) for block_hash, block in found if block_hash is not None]

    def watch_evicted(self) -> list[tuple[int, bytes]]:
        """A list that collects evicted blocks and their hashes from now on; the reader clears it."""
        self._evicted = []
        return self._evicted

    def is_used(self, block: int) -> bool:
        return block in self._ref_counts

    def has(self, block_hash: bytes) -> bool:
        """Whether a block with this hash is known."""
        return block_hash in self._block_of

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known prefix of `hashes`. The caller does not own them until `acquire`."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Sequence[int], *, counts: bool = True) -> None:
        """Add an owner to each of `blocks`, which `match` found. `counts`: count them as reused."""
        for block in blocks:
            self._free.pop(block, None)
            self._ref_counts[block] = self._ref_counts.get(block, 0) + 1
        self.num_reused += len(blocks) * counts

    def allocate(self, num_blocks: int, *, counts: bool = True) -> list[int]:
        """Take the least recently used free blocks and forget their content. `counts`: count them as missed."""
        assert num_blocks <= self.num_free, "the caller has checked num_free"
        blocks = [self._take_oldest() for _ in range(num_blocks)]
        for block in blocks:
            self._ref_counts[block] = 1
        self.num_missed += num_blocks * counts
        return blocks

    def adopt(self, block_hash: bytes, parent: bytes | None = None, token_ids: Sequence[int] = ()) -> int:
        """Register `block_hash` for a free block. The caller must fill the block before the next step."""
        block = self._take_oldest()
        self._free[block] = None
        self.register(block, block_hash, parent, token_ids)
        return block

    def touch(self, blocks: Sequence[int]) -> None:
        """Make the free blocks of a table the last to be allocated; its end is allocated before its beginning."""
        for block in reversed(blocks):
            if block in self._free:
                self._free.move_to_end(block)

    def _take_oldest(self) -> int:
        """Take the next free block and forget its content."""
        block, _ = self._free.popitem(last=False)
        if (block_hash := self._hash_of.pop(block, None)) is not None:
            del self._block_of[block_hash]
            if block_hash in self._unheard:
                self._unheard.remove(block_hash)
            elif self._listener:
                self._listener.removed(block_hash)
            if self._evicted is not None:
                self._evicted.append((block, block_hash))
        return block

    def register(
        self, block: int, block_hash: bytes, parent: bytes | None = None, token_ids: Sequence[int] = ()
    ) -> None:
        """Make `block`, which is full and computed, available to others. Of two equal blocks, the first is shared.

        Without a parent, listeners are not told: the block holds only some layers, and another block holds the rest.
        """
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash
            if parent is None:
                self._unheard.add(block_hash)
            elif self._listener:
                self._listener.stored(block_hash, parent, token_ids)

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one owner from each block of a table.

        The table's end becomes free first and is allocated first: a prefix without its end is useful, an end without
        its prefix is not. A block without a hash can never be reused, so it goes to the front.
        """
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                del self._ref_counts[block]
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._hash_of)

    def check_integrity(self, block_tables: Iterable[Collection[int]]) -> None:
        """Assert that `block_tables` own exactly the used blocks, and that used and free are all blocks."""
        owners = Counter(block for table in block_tables for block in table)
        assert owners == self._ref_counts, "reference counts differ from the block tables"
        assert self.num_free + self.num_used == self.num_blocks, "a block is lost"
        assert self._free.keys().isdisjoint(self._ref_counts), "a block is both free and used"
        assert {h: b for b, h in self._hash_of.items()} == self._block_of, "the two hash tables differ"
