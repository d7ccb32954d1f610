from __future__ import annotations

import pytest

from llmserve.scheduler.blocks import ROOT_HASH, BlockPool, hash_block


def chain(*blocks: tuple[int, ...], root: bytes = ROOT_HASH) -> list[bytes]:
    hashes = [root]
    for token_ids in blocks:
        hashes.append(hash_block(hashes[-1], token_ids))
    return hashes[1:]


def test_a_hash_depends_on_tokens_their_order_their_beginning_and_the_root() -> None:
    first, second = chain((1, 2), (3, 4))
    assert chain((1, 2), (3, 4)) == [first, second]
    assert chain((2, 1))[0] != first
    assert chain((9, 9), (3, 4))[1] != second
    assert chain((3, 4))[0] != second
    assert chain((1, 2), root=b"adapter")[0] != first


def test_token_ids_of_any_width_hash_differently() -> None:
    assert len({hash_block(ROOT_HASH, ids) for ids in [(1,), (256,), (1, 0), (65536,), (1, 0, 0)]}) == 5


def test_used_and_free_are_all_blocks() -> None:
    pool = BlockPool(4)
    table = pool.allocate(3)
    assert sorted(table) == [0, 1, 2]
    assert (pool.num_free, pool.num_used) == (1, 3)
    pool.release(table)
    assert (pool.num_free, pool.num_used) == (4, 0)
    pool.check_integrity([])


def test_a_shared_block_is_free_after_its_last_owner() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.register(table[0], chain((1,))[0], ROOT_HASH, ())
    shared = pool.match(chain((1,)))
    assert shared == table
    pool.acquire(shared)
    pool.check_integrity([table, shared])
    pool.release(table)
    assert pool.num_used == 1
    pool.release(shared)
    assert pool.num_used == 0


def test_a_free_block_is_revived_by_its_hash_until_it_is_taken() -> None:
    pool = BlockPool(2)
    hashes = chain((1,), (2,))
    table = pool.allocate(2)
    for block, block_hash in zip(table, hashes, strict=True):
        pool.register(block, block_hash, ROOT_HASH, ())
    pool.release(table)
    assert pool.match(hashes) == table
    taken = pool.allocate(1)
    assert taken == [table[1]], "the end of a chain is taken before its beginning"
    assert pool.match(hashes) == table[:1]
    pool.acquire(table[:1])
    pool.check_integrity([taken, table[:1]])
    assert pool.num_free == 0


def test_the_least_recently_used_content_is_forgotten_first() -> None:
    pool = BlockPool(3)
    tables = [pool.allocate(1) for _ in range(3)]
    for number, table in enumerate(tables):
        pool.register(table[0], chain((number,))[0], ROOT_HASH, ())
    for number in (1, 0, 2):
        pool.release(tables[number])
    pool.acquire(pool.match(chain((1,))))  # used again: now the most recent
    pool.release(tables[1])
    pool.allocate(1)
    assert not pool.match(chain((0,)))
    assert pool.match(chain((2,)))
    assert pool.match(chain((1,)))


def test_blocks_without_a_hash_are_taken_before_cached_ones() -> None:
    pool = BlockPool(2)
    [cached], [partial] = pool.allocate(1), pool.allocate(1)
    pool.register(cached, chain((1,))[0], ROOT_HASH, ())
    pool.release([cached])
    pool.release([partial])
    assert pool.allocate(1) == [partial]


def test_of_two_blocks_with_the_same_content_the_first_is_shared() -> None:
    pool = BlockPool(2)
    table = pool.allocate(2)
    for block in table:
        pool.register(block, chain((1,))[0], ROOT_HASH, ())
    assert pool.match(chain((1,))) == table[:1]
    pool.check_integrity([table])


def test_match_stops_at_the_first_unknown_block() -> None:
    pool = BlockPool(3)
    hashes = chain((1,), (2,), (3,))
    table = pool.allocate(3)
    pool.register(table[0], hashes[0], ROOT_HASH, ())
    pool.register(table[2], hashes[2], ROOT_HASH, ())
    assert pool.match(hashes) == table[:1]


def test_reuse_is_counted() -> None:
    pool = BlockPool(3)
    table = pool.allocate(2)
    pool.register(table[0], chain((1,))[0], ROOT_HASH, ())
    pool.acquire(pool.match(chain((1,))))
    assert (pool.num_reused, pool.num_missed) == (1, 2)


@pytest.mark.parametrize("tables", [[], [[0]], [[0, 1], [1]], [[0, 2]], [[0, 1, 2]]])
def test_check_integrity_finds_wrong_tables(tables: list[list[int]]) -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    pool.check_integrity([[0, 1]])
    with pytest.raises(AssertionError):
        pool.check_integrity(tables)
