"""What the step thread and those that read and write files do beside each other, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from llmserve.core import GenerateRequest, Tenant
from llmserve.engine.base import RunnerInfo
from llmserve.engine.fake import FakeRunner, fake_engine
from llmserve.engine.kv_files.block_files import BlockFiles
from llmserve.engine.kv_files.keeper import KvKeeper
from llmserve.engine.kv_files.sealed_prefixes import Header, SealedPrefixes
from llmserve.scheduler.scheduler import Scheduler
from llmserve.scheduler.sequence import Sequence
from llmserve.scheduler.settings import SchedulerSettings
from tests.engine.kv_files.test_keeper import INFO, LONG, STATES, answer, hashes_of, nothing, oldest_first, opened

WAIT_S = 60


async def test_a_damaged_file_is_written_again(tmp_path: Path) -> None:
    engine = opened(tmp_path)
    assert engine._keeper is not None
    found = []
    for start in (100, 200):
        found.append((await answer(engine, LONG))[1].cached_tokens)
        await answer(engine, tuple(range(start, start + 40)))  # needs the whole pool
        engine._keeper._writer.submit(int).result()
        if start == 100:
            [path] = [path for path in oldest_first(tmp_path) if path.name == hashes_of(LONG)[2].hex()]
            path.write_bytes(b"something else")
    found.append((await answer(engine, LONG))[1].cached_tokens)
    engine.close()
    assert found == [0, 8, 28]


async def test_who_comes_while_files_are_looked_through_is_looked_for_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = (LONG[:20], tuple(range(100, 120)))
    engine = opened(tmp_path)
    for prompt in prompts:
        await answer(engine, prompt, 4)
    engine.close()
    monkeypatch.setattr(BlockFiles, "latest", nothing)
    looks, goes_on = Event(), Event()
    fetch = KvKeeper.fetch

    def waiting(keeper: KvKeeper, sequences: Seq[Sequence]) -> bool:
        looks.set()
        assert goes_on.wait(WAIT_S)
        return fetch(keeper, sequences)

    monkeypatch.setattr(KvKeeper, "fetch", waiting)
    engine = opened(tmp_path, runner=replace(INFO, num_blocks=64))
    first = asyncio.create_task(answer(engine, prompts[0], 4))
    assert await asyncio.to_thread(looks.wait, WAIT_S)
    second = asyncio.create_task(answer(engine, prompts[1], 4))
    await asyncio.sleep(0)
    assert len(engine._streams) == len(prompts)
    goes_on.set()
    assert [(await each)[1].cached_tokens for each in (first, second)] == [16, 16]
    engine.close()


async def test_who_leaves_while_files_are_read_is_not_counted_and_not_read_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(tmp_path)
    await answer(engine, LONG)
    engine.close()
    monkeypatch.setattr(BlockFiles, "latest", nothing)
    reads, goes_on, asked = Event(), Event(), []
    begin = KvKeeper._read

    def waiting(*arguments: Any) -> None:
        reads.set()
        assert goes_on.wait(WAIT_S)
        begin(*arguments)

    monkeypatch.setattr(KvKeeper, "_read", waiting)
    monkeypatch.setattr(BlockFiles, "read", lambda files, key: asked.append(key))
    engine = opened(tmp_path)
    assert engine._keeper is not None
    request = GenerateRequest("r", LONG, tenant=Tenant("one", max_answers=1))
    asking = asyncio.ensure_future(anext(engine.submit(request)))
    assert await asyncio.to_thread(reads.wait, WAIT_S)
    assert engine.allowance(request.tenant).num_answers == 0
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.to_thread(engine._post(lambda: None).result)  # behind those that have left
    assert engine.allowance(request.tenant).num_answers == 1
    goes_on.set()
    engine._keeper._reader.submit(int).result()
    assert asked == []
    engine.close()


async def test_consumers_do_not_wait_for_the_checks_of_an_idle_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, checked, could_have = fake_engine(), Event(), []

    def check() -> None:
        could_have.append(engine._lock.acquire(timeout=WAIT_S))
        engine._lock.release()
        checked.set()

    await answer(engine, LONG)
    monkeypatch.setattr(engine._scheduler, "check_integrity", check)
    await answer(engine, LONG)
    assert await asyncio.to_thread(checked.wait, WAIT_S)
    assert all(could_have)
    engine.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_runner_is_closed_whatever_becomes_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(keeper: KvKeeper, *, saves: bool) -> None:
        raise OSError("no space")

    monkeypatch.setattr(KvKeeper, "close", failing)
    engine = opened(tmp_path)
    runner = engine._runner
    engine.close()
    assert isinstance(runner, FakeRunner)
    assert runner.is_closed


@pytest.mark.parametrize("num_blocks", [5, 7, 12])
def test_sealed_prefixes_that_files_had_are_not_written_again(num_blocks: int) -> None:
    info: RunnerInfo = replace(STATES, num_blocks=num_blocks)
    runner, scheduler = FakeRunner(info), Scheduler(info.scheduler_config(SchedulerSettings()))
    header = Header("", "", info.block_size, 8 * info.block_size, (LONG[:24],), state_bytes=8)
    prefixes = SealedPrefixes(header, [bytes(8 * info.block_size)] * 6 + [bytes(8)])
    hashes, pool, slots = hashes_of(LONG[:24]), scheduler.pool, scheduler.states.slots
    for block_hash in hashes[1:4]:
        pool.adopt(block_hash, b"", ())
    slots.adopt(hashes[-1])
    written: list[int] = []
    runner.write_block = lambda block, content: written.append(block)  # type: ignore[method-assign]
    prefixes.fill(scheduler, runner)
    assert len(pool.match(hashes)) == min(num_blocks, 6)
    assert len(written) == min(num_blocks, 6) - 3
    assert [found for found, _ in slots.known_blocks()] == [hashes[-1]]
    scheduler.check_integrity()
    pool.allocate(num_blocks - 1)
    assert pool.match(hashes[:2]) == pool.match(hashes[:1]), "the end falls out first"
    assert pool.has(hashes[0])
