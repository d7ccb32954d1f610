"""What a router is told of blocks."""

from __future__ import annotations

from typing import Any

from llmserve.cluster.block_events import BlockEvents, number_of
from llmserve.scheduler.blocks import ROOT_HASH, BlockPool, hash_block


class Publisher:
    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []

    def publish_stored(self, **fields: Any) -> None:
        self.told.append(("stored", fields))

    def publish_removed(self, **fields: Any) -> None:
        self.told.append(("removed", fields))


def test_a_router_hears_of_blocks_in_order_whenever_it_came() -> None:
    events = BlockEvents()
    pool = BlockPool(2, events)
    first = hash_block(ROOT_HASH, (1, 2))
    second = hash_block(first, (3, 4))
    table = pool.allocate(2)
    pool.register(table[0], first, ROOT_HASH, (1, 2))
    publisher = Publisher()
    events.publish_to(publisher)
    pool.register(table[1], second, first, (3, 4))
    pool.release(table)
    pool.allocate(2)
    one, other = number_of(first), number_of(second)
    assert publisher.told == [
        ("stored", {"token_ids": [1, 2], "num_block_tokens": [2], "block_hashes": [one], "parent_hash": None}),
        ("stored", {"token_ids": [3, 4], "num_block_tokens": [2], "block_hashes": [other], "parent_hash": one}),
        ("removed", {"block_hashes": [other]}),
        ("removed", {"block_hashes": [one]}),
    ]
    assert -(2**63) <= one < 2**63


def test_what_left_before_a_router_came_is_neither_kept_nor_told() -> None:
    """A worker that no router asks runs for months."""
    events = BlockEvents()
    pool = BlockPool(2, events)
    parent = ROOT_HASH
    for number in range(100):
        block_hash = hash_block(parent, (number,))
        table = pool.allocate(1)
        pool.register(table[0], block_hash, parent, (number,))
        pool.release(table)
        parent = block_hash
    publisher = Publisher()
    events.publish_to(publisher)
    assert [fields["token_ids"] for _, fields in publisher.told] == [[98], [99]]
