"""Who owns which KV block. Ints only: what the blocks contain is the runner's business.

A block is used (one or more sequences refer to it) or free. A full block keeps the hash of its content when it becomes
free, so that a later prompt with the same beginning can revive it; free blocks are taken least recently used first.

Blocks are found by a chained SHA-256 of (parent hash, token ids). A short hash plus a comparison of the token ids would
have to compare the whole chain up to the root, because the same ids after another beginning have another content. With
a cryptographic hash equality of hashes is equality of contents, also when somebody chooses prompts in order to collide.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence, Set
from typing import Protocol

ROOT_HASH = b""


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block that follows `parent`. What else changes its content (an adapter, a salt) is in the root."""
    return hashlib.sha256(len(parent).to_bytes(4, "little") + parent + array("q", token_ids).tobytes()).digest()


def root_hash(adapter: str) -> bytes:
    """What precedes the first block of a sequence that this adapter computes; empty: none does."""
    return f"adapter {adapter}".encode() if adapter else ROOT_HASH


class BlockListener(Protocol):
    """Hears what could be found by its hash, and what no longer can. Called in the thread that plans, so briefly."""

    def stored(self, block_hash: bytes, parent: bytes, token_ids: Sequence[int]) -> None: ...

    def removed(self, block_hash: bytes) -> None: ...


class BlockPool:
    """`num_blocks` blocks, each free or referred to by one or more block tables."""

    def __init__(self, num_blocks: int, listener: BlockListener | None = None) -> None:
        self.num_blocks = num_blocks
        self._listener = listener
        self.num_reused = 0  # blocks found by hash, since the start
        self.num_missed = 0  # blocks that had to be computed, since the start
        self._ref_counts: dict[int, int] = {}  # used blocks only
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # first: taken next
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._unheard: set[bytes] = set()  # known hashes that no listener hears of
        self._evicted: list[tuple[int, bytes]] | None = None

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._ref_counts)

    @property
    def has_blank(self) -> bool:
        """Whether there is a free block that nothing can be found in."""
        return bool(self._free) and next(iter(self._free)) not in self._hash_of

    @property
    def has_listener(self) -> bool:
        return self._listener is not None

    def known_hashes(self) -> Set[bytes]:
        """Of blocks that can be found, and that listeners hear of."""
        return self._block_of.keys() - self._unheard

    def known_blocks(self) -> list[tuple[bytes, int]]:
        """Hash and block of each that can be found, in the order in which they are given away; used ones last."""
        found = ((self._hash_of.get(block), block) for block in (*self._free, *self._ref_counts))
        return [(block_hash, block) for block_hash, block in found if block_hash is not None]

    def watch_evicted(self) -> list[tuple[int, bytes]]:
        """Blocks that are given away from now on, and what they held; whoever reads the list empties it."""
        self._evicted = []
        return self._evicted

    def is_used(self, block: int) -> bool:
        return block in self._ref_counts

    def has(self, block_hash: bytes) -> bool:
        """Whether a block can be found by it."""
        return block_hash in self._block_of

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks that hold the longest known beginning of `hashes`. They are not owned before `acquire`."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Sequence[int], *, counts: bool = True) -> None:
        """One more owner for each of `blocks`, which `match` found. `counts`: as reused."""
        for block in blocks:
            self._free.pop(block, None)
            self._ref_counts[block] = self._ref_counts.get(block, 0) + 1
        self.num_reused += len(blocks) * counts

    def allocate(self, num_blocks: int, *, counts: bool = True) -> list[int]:
        """Take the least recently used free blocks; their old content is forgotten. `counts`: as missed."""
        assert num_blocks <= self.num_free, "the caller has checked num_free"
        blocks = [self._take_oldest() for _ in range(num_blocks)]
        for block in blocks:
            self._ref_counts[block] = 1
        self.num_missed += num_blocks * counts
        return blocks

    def adopt(self, block_hash: bytes, parent: bytes | None = None, token_ids: Sequence[int] = ()) -> int:
        """A free block that can be found from now on, and has to get its content before the next step."""
        block = self._take_oldest()
        self._free[block] = None
        self.register(block, block_hash, parent, token_ids)
        return block

    def touch(self, blocks: Sequence[int]) -> None:
        """Free ones of a table are the last to be given away, its end before its beginning."""
        for block in reversed(blocks):
            if block in self._free:
                self._free.move_to_end(block)

    def _take_oldest(self) -> int:
        """No longer free, and its content is forgotten."""
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
        """`block` is full and computed: others may share it. Of two with the same content, the first is shared.

        Without a parent no listener hears of it: it holds some layers only, beside a block that holds the others.
        """
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash
            if parent is None:
                self._unheard.add(block_hash)
            elif self._listener:
                self._listener.stored(block_hash, parent, token_ids)

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less for each block of a table.

        The table's end becomes free first, so it is also taken first: a beginning without its end is of use, an end
        without its beginning is not. A block without a hash can never be revived and goes to the front.
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
