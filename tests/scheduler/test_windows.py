"""Layers with a window own the blocks that they can still read. Loads of every kind are in `test_properties.py`."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from unittest.mock import patch

import pytest

from llmserve.core import SamplingParams
from llmserve.scheduler import scheduler as scheduler_module
from llmserve.scheduler.blocks import BlockPool
from llmserve.scheduler.sequence import Sequence
from llmserve.scheduler.settings import Policy, SchedulerConfig, WindowedLayers
from llmserve.scheduler.windows import Windowed, WindowedBlocks
from tests.scheduler.harness import INFO, PLAIN, Bench

LAYERS = WindowedLayers(window=6, num_tables=2, least_chunk=4)
SLIDING = replace(INFO, windowed_layers=LAYERS, num_blocks=200)
LONG = SamplingParams(max_tokens=40, temperature=0.0)
BEGINNING = tuple(place % 7 for place in range(24))


def num_windowed(bench: Bench, sequence_id: int) -> int:
    sequence = bench.sequences[sequence_id]
    return len(bench.scheduler.windows.owned(sequence)) - len(sequence.block_table)


def test_a_sequence_has_its_window_and_no_more() -> None:
    bench = Bench(SLIDING)
    [one] = bench.add((1, 2, 3), LONG)
    most = 0
    while one not in bench.reasons:
        bench.step()
        most = max(most, num_windowed(bench, one))
    assert most == 2 * 2, "between two steps; a window of six tokens begins anywhere in a block of four"
    bench.assert_answers()


def test_as_many_sequences_run_as_blocks_allow() -> None:
    """Sixteen blocks hold a sequence; in two tables more it needs four each, and not sixteen."""
    needed = 16 + 2 * 4
    for num_fitting in (1, 2, 3):
        bench = Bench(replace(SLIDING, num_blocks=num_fitting * needed + needed - 1))
        for number in range(4):
            bench.add((number,) * 4, replace(LONG, max_tokens=60))
        bench.step()
        assert len(bench.scheduler.running) == num_fitting
        bench.run()
        bench.assert_answers()


def test_a_window_that_is_shared_is_needed_once() -> None:
    needed, num_shared = 16 + 2 * 4, 6
    bench = Bench(replace(SLIDING, num_blocks=2 * needed - num_shared))
    bench.add((*BEGINNING, 1), LONG)
    for _ in range(2):
        bench.step()
    bench.add((*BEGINNING, 2), LONG)
    bench.step()
    assert len(bench.scheduler.running) == 2
    bench.run()
    bench.assert_answers()


def test_a_prompt_goes_on_by_small_chunks_where_no_block_is_left() -> None:
    prompt = BEGINNING * 2
    for num_blocks, longest in ((14 + 2 * 4, 8), (200, INFO.max_num_tokens)):
        bench = Bench(replace(SLIDING, num_blocks=num_blocks))
        bench.add(prompt, replace(LONG, max_tokens=8))
        lengths = []
        while bench.scheduler.has_work:
            plan = bench.step()
            assert plan is not None
            lengths += [len(chunk.token_ids) for chunk in plan.chunks]
        assert lengths[0] == INFO.max_num_tokens, "a window that is empty leaves room"
        assert lengths[1] == longest >= LAYERS.least_chunk
        bench.assert_answers()


def test_a_beginning_is_found_where_its_window_is() -> None:
    bench = Bench(SLIDING)
    bench.add((*BEGINNING, 1), replace(LONG, max_tokens=1))
    bench.run()
    assert found(bench, (*BEGINNING, 2, 2)) == 24
    assert found(bench, (*BEGINNING[:14], 2, 2)) == 12, "what was given back has not been taken yet"
    evict(bench, bench.sequences[0], [5], table=1)
    assert found(bench, (*BEGINNING, 3, 3)) == 20
    evict(bench, bench.sequences[0], [2], table=0)
    assert found(bench, (*BEGINNING, 4, 4)) == 24, "computed again since, and its window does not reach the lost block"
    assert found(bench, (*BEGINNING[:14], 3, 3)) == 8
    bench.assert_answers()


def found(bench: Bench, prompt: Seq[int]) -> int:
    [one] = bench.add(prompt, replace(LONG, max_tokens=1))
    bench.run()
    return bench.sequences[one].num_cached_tokens


def evict(bench: Bench, sequence: Sequence, places: Seq[int], *, table: int) -> None:
    """Nothing is found any more in these blocks of a table with a window."""
    pool = bench.scheduler.pool
    hashes = sequence.block_hashes(6, INFO.block_size)
    for place in places:
        [block] = pool.match([hashes[place] + bytes((table,))])
        pool._free.move_to_end(block, last=False)
        assert pool.allocate(1) == [block]
        pool.release([block])


def test_answers_of_a_request_share_their_window() -> None:
    bench = Bench(SLIDING)
    ids = bench.add((*BEGINNING, 1), SamplingParams(max_tokens=20, seed=1), num_sequences=4)
    bench.run()
    assert [bench.sequences[one].num_cached_tokens for one in ids] == [0, 24, 24, 24]
    bench.assert_answers()


def test_a_listener_hears_of_whole_blocks_only() -> None:
    bench = Bench(SLIDING)
    bench.add((*BEGINNING, 1), LONG)
    bench.run()
    assert len(bench.listener.found) == 15


# Negative controls: each fault must be found.


class HastyWindows(WindowedBlocks):
    """Gives a block back while it is read."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        super().__init__(config, pool)
        self._layers = replace(LAYERS, window=LAYERS.window - 4)


class LeakingWindows(WindowedBlocks):
    """Keeps a block that nobody reads."""

    def shorten(self, sequence: Windowed, num_blocks: int) -> None:
        super().shorten(sequence, num_blocks + 1)

    def advance(self, sequence: Windowed) -> None:
        sequence.num_given_back += sequence.num_given_back == 1
        super().advance(sequence)


class TrustingWindows(WindowedBlocks):
    """Takes beginnings whose window is gone."""

    def longest(self, hashes: Seq[bytes], is_known: Callable[[bytes], bool] | None = None) -> int:
        return len(hashes)

    def _found(self, hashes: Seq[bytes]) -> list[int]:
        return [block for key in self.keys(hashes) for block in self.pool.match((key,)) or [0]]


def run_random_loads(windows: type[WindowedBlocks]) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        info = replace(SLIDING, num_blocks=rng.randint(22, 40), max_num_tokens=rng.randint(1, 24))
        with patch.object(scheduler_module, "WindowedBlocks", windows):
            bench = Bench(info, replace(PLAIN, policy=rng.choice(list(Policy))))
        for _ in range(6):
            beginning = rng.choice([(), (1, 2, 3, 4) * 4, (5, 2, 3, 4) * 4])
            bench.add((*beginning, *rng.choices(range(7), k=rng.randint(1, 8))), SamplingParams(max_tokens=9))
            if rng.random() < 0.5:
                bench.step()
        bench.run(1000)
        bench.assert_answers()


def test_random_loads_pass_without_a_fault() -> None:
    run_random_loads(WindowedBlocks)


@pytest.mark.parametrize("windows", [HastyWindows, LeakingWindows, TrustingWindows])
def test_a_fault_is_found(windows: type[WindowedBlocks]) -> None:
    with pytest.raises(AssertionError):
        run_random_loads(windows)
