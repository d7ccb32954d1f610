"""KV blocks outlive the pool and the process: answers are those of a cold prefill, whatever happens to the files."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.core import GenerateRequest, SamplingParams, Usage
from llmserve.engine.base import Engine, RunnerInfo
from llmserve.engine.fake import FAKE_RUNNER_INFO, FakeRunner, fake_answer, fake_engine
from llmserve.engine.inflight import InflightEngine
from llmserve.engine.kv_files import keeper
from llmserve.engine.kv_files.block_files import BlockFiles, is_state, state_key
from llmserve.engine.kv_files.keeper import KvKeeper
from llmserve.scheduler.blocks import hash_block
from llmserve.scheduler.scheduler import Scheduler
from llmserve.scheduler.settings import NO_WINDOWS, Policy, SchedulerSettings, WindowedLayers
from llmserve.scheduler.windows import windowed_keys
from tests.engine.fake.pipelined import PipelinedFakeRunner

INFO = replace(FAKE_RUNNER_INFO, num_blocks=12)  # of four tokens: room for one prompt and its answer
BLOCK_BYTES = 8 * INFO.block_size
STATES = replace(INFO, num_states=5, state_bytes=8, block_bytes=4)  # one behind every second block
WINDOWS = replace(INFO, num_blocks=24, windowed_layers=WindowedLayers(window=10, num_tables=2, least_chunk=8))
BOTH = replace(STATES, num_blocks=24, windowed_layers=WINDOWS.windowed_layers)
LONG = tuple(range(32))


def nothing(*_: object) -> list[bytes]:
    """Instead of `latest`: all is read on demand."""
    return []


def opened(
    folder: Path, info: str = "fake", settings: SchedulerSettings | None = None, *, runner: RunnerInfo = INFO
) -> InflightEngine:
    files = BlockFiles(folder, info, BLOCK_BYTES, state_bytes=runner.state_bytes)
    return fake_engine(runner, settings, files=files)


async def answer(engine: Engine, prompt: Sequence[int], max_tokens: int = 8) -> tuple[list[int], Usage]:
    request = GenerateRequest("r", tuple(prompt), SamplingParams(max_tokens=max_tokens, temperature=0.0))
    async with aclosing(engine.submit(request)) as events:
        told = [event async for event in events]
    assert told[-1].usage is not None
    return [token for event in told for token in event.token_ids], told[-1].usage


def oldest_first(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(files, key=lambda path: path.stat().st_mtime_ns)


def restored(engine: InflightEngine) -> int:
    return engine.stats().total_restored_blocks or 0


async def test_what_has_fallen_out_of_the_pool_is_found(tmp_path: Path) -> None:
    engine = opened(tmp_path)
    first, usage = await answer(engine, LONG)
    assert usage.cached_tokens == 0
    await answer(engine, tuple(range(100, 140)))  # needs the whole pool
    again, usage = await answer(engine, LONG)
    assert again == first == fake_answer(LONG, 8)
    assert usage.cached_tokens == 28  # of 32: the last token is computed, and so its block
    assert restored(engine) == 7
    while (engine.stats().total_stored_blocks or 0) < 7:  # they are written beside the steps, which tell the count
        await answer(engine, (1,))
    engine.close()


async def test_a_restart_begins_with_what_was_in_the_pool(tmp_path: Path) -> None:
    engine = opened(tmp_path)
    await answer(engine, LONG)
    engine.close()
    engine = opened(tmp_path)
    again, usage = await answer(engine, (*LONG, 77, 78))
    stays, in_memory = await answer(engine, (*LONG, 77, 79))
    engine.close()
    assert (again, stays) == (fake_answer((*LONG, 77, 78), 8), fake_answer((*LONG, 77, 79), 8))
    assert (usage.cached_tokens, in_memory.cached_tokens) == (32, 32)
    assert restored(engine) >= 8
    other = opened(tmp_path, "another engine")
    found, usage = await answer(other, LONG)
    other.close()
    assert (found, usage.cached_tokens) == (fake_answer(LONG, 8), 0)


def hashes_of(token_ids: Sequence[int]) -> list[bytes]:
    found: list[bytes] = []
    for start in range(0, len(token_ids), INFO.block_size):
        found.append(hash_block(found[-1] if found else b"", token_ids[start : start + INFO.block_size]))
    return found


def state_files(folder: Path) -> list[Path]:
    return [path for path in oldest_first(folder) if is_state(bytes.fromhex(path.name))]


@pytest.mark.parametrize("on_demand", [True, False])
@pytest.mark.parametrize("runner", [STATES, WINDOWS, BOTH], ids=["states", "windows", "both"])
async def test_states_and_windows_outlive_the_pool_and_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: RunnerInfo, on_demand: bool
) -> None:
    if on_demand:
        monkeypatch.setattr(BlockFiles, "latest", nothing)
    engine = opened(tmp_path, runner=runner)
    first, usage = await answer(engine, LONG)
    assert usage.cached_tokens == 0
    for start in (100, 200, 300):  # needs the whole pool, and all slots
        await answer(engine, tuple(range(start, start + 40)))
    again, usage = await answer(engine, LONG)
    assert (again, usage.cached_tokens) == (first, 28)
    engine.close()
    engine = opened(tmp_path, runner=runner)
    found, usage = await answer(engine, LONG)
    longer, more = await answer(engine, (*LONG, 77, 78))
    engine.close()
    assert (found, longer) == (first, fake_answer((*LONG, 77, 78), 8))
    assert (usage.cached_tokens, more.cached_tokens) == (28, 32)


@pytest.mark.parametrize("fault", ["gone", "damaged"])
async def test_without_its_window_a_shorter_beginning_is_found(tmp_path: Path, fault: str) -> None:
    """Behind 28 tokens, blocks 4 to 6 are read; behind 20, blocks 2 to 4. Only what is computed is written again."""
    engine = opened(tmp_path, runner=WINDOWS)
    first, _ = await answer(engine, LONG)
    engine.close()
    hashes = hashes_of(LONG[:28])
    paths = {path.name: path for path in oldest_first(tmp_path)}
    assert {key.hex() for block_hash in hashes for key in windowed_keys(block_hash, 2)} <= paths.keys()
    for lost, num_found in (([(3, 0)], 28), ([(5, 1)], 12), ([(5, 1)], 20), ([(0, 0), (2, 1), (4, 0)], 0)):
        for place, table in lost:
            path = paths[windowed_keys(hashes[place], 2)[table].hex()]
            if fault == "gone":
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(b"something else")
        engine = opened(tmp_path, runner=WINDOWS)
        found, usage = await answer(engine, LONG, 1)
        engine.close()
        assert (found, usage.cached_tokens) == (first[:1], num_found)


@pytest.mark.parametrize("fault", ["gone", "damaged"])
async def test_without_a_state_an_earlier_one_is_found(tmp_path: Path, fault: str) -> None:
    engine = opened(tmp_path, runner=STATES)
    first, _ = await answer(engine, LONG)
    engine.close()
    hashes = [b"", *hashes_of(LONG[:28])]
    paths = {path.name: path for path in state_files(tmp_path)}
    assert {state_key(hashes[count]).hex() for count in (2, 4, 6, 7)} <= paths.keys()
    for counts, num_found in (((6, 7), 16), ((2, 4, 6, 7), 0)):
        for path in (paths[state_key(hashes[count]).hex()] for count in counts):
            if fault == "gone":
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(b"something else")
        engine = opened(tmp_path, runner=STATES)
        found, usage = await answer(engine, LONG, 1)
        engine.close()
        assert (found, usage.cached_tokens) == (first[:1], num_found)


@pytest.mark.parametrize("another_comes", [True, False])
def test_a_state_that_the_last_step_gave_away_is_kept(tmp_path: Path, another_comes: bool) -> None:
    files = BlockFiles(tmp_path, "fake", BLOCK_BYTES, state_bytes=8)
    runner = FakeRunner(STATES)
    scheduler = Scheduler(STATES.scheduler_config(SchedulerSettings()))
    keeper = KvKeeper(files, runner, scheduler, lambda fetched: None, lambda task: Future(), ())
    old, new, slots = hash_block(b"", [1]), hash_block(b"", [2]), scheduler.states.slots
    runner.write_state(slots.adopt(old, b"", ()), bytes([1] * 8))
    slots.release(slots.allocate(STATES.num_states))  # as by a sequence that ends with the step that takes a slot more
    if another_comes:
        keeper._adopt({state_key(new): bytes([2] * 8)})
    keeper.close(saves=True)
    assert [files.read(state_key(one)) for one in (old, new)] == [bytes([1] * 8), None]
    runner.close()


async def test_what_is_counted_are_blocks_with_all_layers(tmp_path: Path) -> None:
    """So the counts are those of the same network without windows."""
    counts = []
    for layers in (NO_WINDOWS, WINDOWS.windowed_layers):
        info = replace(INFO, num_blocks=32 * (1 + layers.num_tables), windowed_layers=layers)
        engine = opened(tmp_path / str(layers.num_tables), runner=info)
        for prompt in (LONG, (*LONG[:16], 1), (*LONG, 1)):
            await answer(engine, prompt)
        stats, kept = engine.stats(), engine._keeper
        engine.close()
        assert kept is not None
        assert (stats.max_num_blocks, stats.free_num_blocks, stats.used_num_blocks) == (32, 32, 0)
        counts.append((stats.reused_blocks, stats.missed_blocks, kept.num_stored))
        again = opened(tmp_path / str(layers.num_tables), runner=info)
        await answer(again, (*LONG, 1))
        again.close()
        assert 8 <= restored(again) <= kept.num_stored
    assert counts[0] == counts[1]
    assert counts[0][0] == 4 + 8


@pytest.mark.parametrize(("start_s", "num_at_once"), [(3600.0, INFO.num_blocks), (-1.0, 2)])
async def test_what_was_used_last_is_read_before_anybody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_s: float, num_at_once: int
) -> None:
    monkeypatch.setattr(keeper, "PUT_AT_ONCE", 2 * BLOCK_BYTES)
    monkeypatch.setattr(keeper, "NUM_READERS", 1)
    monkeypatch.setattr(keeper, "START_S", start_s)
    engine = opened(tmp_path)
    for start in range(0, 120, 40):  # more than the pool has room for
        first, _ = await answer(engine, tuple(range(start, start + 36)))
    engine.close()
    beginning_last = [block_hash.hex() for block_hash in hashes_of(range(80, 116))[::-1]]
    assert [path.name for path in oldest_first(tmp_path)][-9:] == beginning_last
    monkeypatch.setattr(KvKeeper, "fetch", lambda *_: False)  # on demand nothing is read
    engine = opened(tmp_path)
    assert restored(engine) >= num_at_once
    assert engine._keeper is not None
    engine._keeper._first_reader.submit(int).result()  # behind what is read when the engine is ready
    await answer(engine, tuple(range(500, 505)), 1)  # in the place of what was used before
    again, usage = await answer(engine, tuple(range(80, 116)))
    engine.close()
    assert restored(engine) == INFO.num_blocks
    assert again == first
    assert usage.cached_tokens == 32


async def test_what_is_read_on_demand_was_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(tmp_path)
    await answer(engine, LONG)
    engine.close()
    for path in oldest_first(tmp_path):
        os.utime(path, (0, 0))
    monkeypatch.setattr(BlockFiles, "latest", nothing)
    engine = opened(tmp_path)
    await answer(engine, LONG[:17], 1)
    beginning_last = [block_hash.hex() for block_hash in hashes_of(LONG[:16])[::-1]]
    assert [path.name for path in oldest_first(tmp_path)][-4:] == beginning_last
    engine.close()


async def test_servers_share_a_folder(tmp_path: Path) -> None:
    here, there = opened(tmp_path), opened(tmp_path)
    await answer(here, LONG)
    here.close()
    found, usage = await answer(there, LONG)
    there.close()
    assert found == fake_answer(LONG, 8)
    assert usage.cached_tokens == 28


@pytest.mark.parametrize("place", [0, 3, 7])
@pytest.mark.parametrize("on_demand", [True, False])
async def test_a_damaged_file_is_computed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, place: int, on_demand: bool
) -> None:
    engine = opened(tmp_path)
    await answer(engine, LONG)
    engine.close()
    if on_demand:
        monkeypatch.setattr(BlockFiles, "latest", nothing)
    oldest_first(tmp_path)[place].write_bytes(b"something else")
    engine = opened(tmp_path)
    found, _ = await answer(engine, LONG)
    engine.close()
    assert found == fake_answer(LONG, 8)
    assert caplog.text.count("a block is damaged") <= 1


async def test_several_answers_to_a_prompt_wait_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(tmp_path)
    await answer(engine, LONG[:16], 4)
    engine.close()
    monkeypatch.setattr(BlockFiles, "latest", nothing)
    engine = opened(tmp_path)
    request = GenerateRequest("r", LONG[:17], SamplingParams(max_tokens=4, temperature=0.0), num_sequences=3)
    async with aclosing(engine.submit(request)) as events:
        told = [event async for event in events]
    engine.close()
    assert sorted(event.sequence_index for event in told if event.finish_reason) == [0, 1, 2]
    assert restored(engine) == 4


async def test_who_leaves_while_files_are_read_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(tmp_path)
    await answer(engine, LONG)
    engine.close()
    monkeypatch.setattr(BlockFiles, "latest", nothing)
    engine = opened(tmp_path)
    for _ in range(20):
        task = asyncio.create_task(answer(engine, LONG))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await answer(engine, LONG))[0] == fake_answer(LONG, 8)
    assert engine.stats().num_active_requests == 0
    assert engine.healthy()
    waiting = engine.submit(GenerateRequest("r", LONG))
    engine.close()
    await waiting.aclose()


async def test_hashes_are_not_remembered_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "MAX_KNOWN", 3)
    engine = opened(tmp_path)
    for number in range(4):
        await answer(engine, tuple(range(number, number + 32)))
        await answer(engine, LONG)
    engine.close()
    assert engine._keeper is not None
    assert len(engine._keeper._known) <= 3
    engine = opened(tmp_path)
    found, usage = await answer(engine, LONG)
    engine.close()
    assert (found, usage.cached_tokens) == (fake_answer(LONG, 8), 28)


async def test_what_was_removed_to_make_room_is_written_again(tmp_path: Path) -> None:
    """Of a prompt that is in the pool all the time, the files are the oldest."""
    files = BlockFiles(tmp_path, "fake", BLOCK_BYTES, max_bytes=12 * (BLOCK_BYTES + 48))
    engine = fake_engine(replace(INFO, num_blocks=22), files=files)
    whole_pool = tuple(range(500, 584))
    await answer(engine, LONG[:20], 4)
    await answer(engine, whole_pool, 4)
    for number in range(12):
        _, usage = await answer(engine, LONG[:20], 4)
        assert usage.cached_tokens == 16
        await answer(engine, tuple(range(100 + 20 * number, 150 + 20 * number)), 4)
    assert engine._keeper is not None
    engine._keeper._writer.submit(int).result()  # all has been written, and what was removed is known
    await answer(engine, whole_pool, 4)
    found, usage = await answer(engine, LONG[:20], 4)
    engine.close()
    assert (found, usage.cached_tokens) == (fake_answer(LONG[:20], 4), 16)


async def test_what_was_found_in_memory_is_not_removed_for_what_closing_writes(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path, "fake", BLOCK_BYTES, max_bytes=14 * (BLOCK_BYTES + 48))
    engine = fake_engine(replace(INFO, num_blocks=22), files=files)
    hot = LONG[:20]
    await answer(engine, hot, 4)
    await answer(engine, tuple(range(500, 584)), 4)  # needs the whole pool
    for start in (100, 200):
        await answer(engine, tuple(range(start, start + 16)), 1)
        await answer(engine, hot, 4)
    assert engine._keeper is not None
    engine._keeper._writer.submit(int).result()
    names = {block_hash.hex() for block_hash in hashes_of(hot)[:4]}
    for path in oldest_first(tmp_path):
        if path.name in names:
            os.utime(path, (0, 0))
    engine.close()
    assert names <= {path.name for path in oldest_first(tmp_path)}


async def test_a_runner_that_begins_steps_ahead_has_no_files(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path, "fake", BLOCK_BYTES)
    with closing(fake_engine(INFO)) as plain:
        engine = InflightEngine(PipelinedFakeRunner(INFO), plain.info, files=files)
    await answer(engine, LONG)
    found, _ = await answer(engine, tuple(range(100, 140)))
    engine.close()
    assert found == fake_answer(tuple(range(100, 140)), 8)
    assert engine.stats().total_restored_blocks is None
    assert oldest_first(tmp_path) == []


@pytest.mark.parametrize("runner", [INFO, STATES, WINDOWS, BOTH], ids=["plain", "states", "windows", "both"])
@pytest.mark.parametrize("seed", range(4))
async def test_answers_do_not_depend_on_files(tmp_path: Path, seed: int, runner: RunnerInfo) -> None:
    """Prompts with few beginnings in a pool for few of them, restarts, and files that are damaged or gone."""
    rng = random.Random(seed)
    beginnings = [tuple(rng.choices(range(50), k=rng.choice([4, 9, 16]))) for _ in range(4)]
    settings = SchedulerSettings(policy=rng.choice(list(Policy)))
    for _ in range(4):
        engine = opened(tmp_path, settings=settings, runner=runner)
        for _ in range(6):
            texts = [rng.choice(beginnings) + rng.choice(beginnings) for _ in range(rng.randint(1, 5))]
            prompts = [text[: rng.randint(1, 28)] for text in texts]
            found = await asyncio.gather(*(answer(engine, prompt, 6) for prompt in prompts))
            assert [tokens for tokens, _ in found] == [fake_answer(prompt, 6) for prompt in prompts]
        assert engine.healthy()
        engine.close()
        for path in oldest_first(tmp_path):
            if rng.random() < 0.1:
                path.write_bytes(path.read_bytes()[:-8] + bytes(8))
            elif rng.random() < 0.1:
                path.unlink()
