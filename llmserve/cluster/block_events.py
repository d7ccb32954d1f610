"""Reports the blocks in an engine's cache to Dynamo's router, which sends a prompt where its beginning is cached."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class Publisher(Protocol):
    """The methods of Dynamo's `KvEventPublisher` that are used here."""

    def publish_stored(
        self, *, token_ids: list[int], num_block_tokens: list[int], block_hashes: list[int], parent_hash: int | None
    ) -> Any: ...

    def publish_removed(self, *, block_hashes: list[int]) -> Any: ...


class BlockEvents:
    """A `BlockListener`. When a publisher is set, it first gets all blocks in the cache."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._publisher: Publisher | None = None
        self._early: dict[bytes, _Block] = {}  # blocks in the cache, until there is a publisher

    def publish_to(self, publisher: Publisher) -> None:
        with self._lock:
            for block_hash, block in self._early.items():
                block.tell(publisher, block_hash)
            self._early.clear()
            self._publisher = publisher

    def stored(self, block_hash: bytes, parent: bytes, token_ids: Sequence[int]) -> None:
        block = _Block(parent, list(token_ids))
        with self._lock:
            if self._publisher is None:
                self._early[block_hash] = block
            else:
                block.tell(self._publisher, block_hash)

    def removed(self, block_hash: bytes) -> None:
        with self._lock:
            if self._publisher is None:
                del self._early[block_hash]
            else:
                self._publisher.publish_removed(block_hashes=[number_of(block_hash)])


class _Block(NamedTuple):
    parent: bytes  # empty for the first block of a prompt
    token_ids: list[int]

    def tell(self, publisher: Publisher, block_hash: bytes) -> None:
        publisher.publish_stored(
            token_ids=self.token_ids,
            num_block_tokens=[len(self.token_ids)],
            block_hashes=[number_of(block_hash)],
            parent_hash=number_of(self.parent) if self.parent else None,
        )


def number_of(block_hash: bytes) -> int:
    """Dynamo's hash of a block: signed, the first 64 bits of llmserve's. Dynamo compares tokens, not hashes."""
    return int.from_bytes(block_hash[:8], "little", signed=True)
