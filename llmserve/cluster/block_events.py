"""Which blocks an engine has in its cache, told to Dynamo's router: it sends a prompt where its beginning lies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Publisher(Protocol):
    """Dynamo's `KvEventPublisher`, as far as we use it."""

    def publish_stored(
        self, *, token_ids: list[int], num_block_tokens: list[int], block_hashes: list[int], parent_hash: int | None
    ) -> Any: ...

    def publish_removed(self, *, block_hashes: list[int]) -> Any: ...


class BlockEvents:
    """A `BlockListener`. What happens before there is a publisher is told when there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._publisher: Publisher | None = None
        self._waiting: list[Callable[[Publisher], Any]] = []

    def publish_to(self, publisher: Publisher) -> None:
        with self._lock:
            for tell in self._waiting:
                tell(publisher)
            self._waiting.clear()
            self._publisher = publisher

    def stored(self, block_hash: bytes, parent: bytes, token_ids: Sequence[int]) -> None:
        ids, own, before = list(token_ids), number_of(block_hash), number_of(parent) if parent else None
        self._tell(
            lambda publisher: publisher.publish_stored(
                token_ids=ids, num_block_tokens=[len(ids)], block_hashes=[own], parent_hash=before
            )
        )

    def removed(self, block_hash: bytes) -> None:
        own = number_of(block_hash)
        self._tell(lambda publisher: publisher.publish_removed(block_hashes=[own]))

    def _tell(self, tell: Callable[[Publisher], Any]) -> None:
        with self._lock:
            if self._publisher is None:
                self._waiting.append(tell)
            else:
                tell(self._publisher)


def number_of(block_hash: bytes) -> int:
    """Dynamo's hashes are signed and have 64 bits: the first ones of ours. What it compares are tokens."""
    return int.from_bytes(block_hash[:8], "little", signed=True)
