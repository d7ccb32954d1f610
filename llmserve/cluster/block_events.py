"""Which blocks an engine has in its cache, told to Dynamo's router: it sends a prompt where its beginning lies."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class Publisher(Protocol):
    """Dynamo's `KvEventPublisher`, as far as we use it."""

    def publish_stored(
        self, *, token_ids: list[int], num_block_tokens: list[int], block_hashes: list[int], parent_hash: int | None
    ) -> Any: ...

    def publish_removed(self, *, block_hashes: list[int]) -> Any: ...


class BlockEvents:
    """A `BlockListener`. A publisher, whenever it comes, is told at once what is there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._publisher: Publisher | None = None
        self._early: dict[bytes, _Block] = {}  # those that are there, until somebody wants to know

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
    parent: bytes  # empty for the first of a prompt
    token_ids: list[int]

    def tell(self, publisher: Publisher, block_hash: bytes) -> None:
        publisher.publish_stored(
            token_ids=self.token_ids,
            num_block_tokens=[len(self.token_ids)],
            block_hashes=[number_of(block_hash)],
            parent_hash=number_of(self.parent) if self.parent else None,
        )


def number_of(block_hash: bytes) -> int:
    """Dynamo's hashes are signed and have 64 bits: the first ones of ours. What it compares are tokens."""
    return int.from_bytes(block_hash[:8], "little", signed=True)
