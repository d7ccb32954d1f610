"""Adapters of an engine: requests of several in one batch, loads and unloads under way, and how many are in memory."""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from llmserve.core import GenerateRequest, SamplingParams
from llmserve.engine.adapters.pool import AdapterPool
from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.base import RunnerInfo, StepResult
from llmserve.engine.fake import FakeRunner, fake_answer, fake_engine
from llmserve.engine.fake.runner import FAKE_RUNNER_INFO, FakePacked, adapter_shift
from llmserve.engine.inflight import InflightEngine
from llmserve.engine.posted import Posted
from llmserve.engine.settings import AdapterLimits
from llmserve.errors import EngineFileError, InternalError, InvalidArgument, ResourceExhausted, Unavailable, Unsupported
from llmserve.scheduler.plan import StepPlan
from tests.sealed_adapters import random_parts, sealed

PROMPT = tuple(range(11, 30))


def adapters(path: Path, count: int) -> list[SealedAdapter]:
    """The fake engine answers with each in another way."""
    found: list[SealedAdapter] = []
    for seed in range(100):
        made = sealed(path / str(seed), random_parts({"0.qkv": (8, 8)}, seed=seed))
        if adapter_shift(made.digest) not in map(adapter_shift, (each.digest for each in found)):
            found.append(made)
        if len(found) == count:
            return found
    raise AssertionError("too few shifts")


def request(adapter: str, num_tokens: int = 12, prompt: tuple[int, ...] = PROMPT) -> GenerateRequest:
    return GenerateRequest("r", prompt, SamplingParams(max_tokens=num_tokens, temperature=0.0), adapter=adapter)


async def answer(engine: InflightEngine, asked: GenerateRequest) -> tuple[list[int], int]:
    """And how many tokens of the prompt were found in the cache."""
    tokens: list[int] = []
    cached = 0
    async with aclosing(engine.submit(asked)) as events:
        async for event in events:
            tokens += event.token_ids
            cached = event.usage.cached_tokens if event.usage else cached
    return tokens, cached


async def test_requests_of_several_adapters_and_of_none_in_one_batch(tmp_path: Path) -> None:
    engine, known = fake_engine(), adapters(tmp_path, 3)
    for adapter in known:
        await asyncio.to_thread(engine.add_adapter, adapter)
    digests = ["", *(adapter.digest for adapter in known)] * 4
    found = await asyncio.gather(*(answer(engine, request(digest)) for digest in digests))
    assert [tokens for tokens, _ in found] == [fake_answer(PROMPT, 12, adapter=digest) for digest in digests]
    engine.close()


async def test_the_prefix_cache_is_each_adapters_own(tmp_path: Path) -> None:
    engine, (first, second) = fake_engine(), adapters(tmp_path, 2)
    for adapter in (first, second):
        await asyncio.to_thread(engine.add_adapter, adapter)
    for digest in ("", first.digest, second.digest):
        wanted = fake_answer(PROMPT, 12, adapter=digest)
        assert await answer(engine, request(digest)) == (wanted, 0)
        assert await answer(engine, request(digest)) == (wanted, 16), "its own blocks are found"
    engine.close()


async def test_what_is_removed_ends_what_it_has_begun(tmp_path: Path) -> None:
    engine, (adapter,) = fake_engine(step_delay_s=0.002), adapters(tmp_path, 1)
    await asyncio.to_thread(engine.add_adapter, adapter)
    async with aclosing(engine.submit(request(adapter.digest, 40))) as events:
        tokens = [*(await anext(events)).token_ids]
        engine.remove_adapter(adapter.digest)
        with pytest.raises(InvalidArgument, match="the engine has no adapter"):
            engine.submit(request(adapter.digest))
        await asyncio.to_thread(engine.add_adapter, adapter)  # a slot of its own beside the old one
        again = await answer(engine, request(adapter.digest))
        async for event in events:
            tokens += event.token_ids
    assert tokens == fake_answer(PROMPT, 40, adapter=adapter.digest)
    assert again[0] == tokens[:12]
    engine.remove_adapter(adapter.digest)
    assert await answer(engine, request("")) == (fake_answer(PROMPT, 12), 0)
    engine.close()


class Counting(FakeRunner):
    """Counts what is in its slots."""

    def __init__(self, info: RunnerInfo = FAKE_RUNNER_INFO) -> None:
        super().__init__(info)
        self.most = 0
        self.num_loads = 0
        self.thread = 0

    @property
    def num_loaded(self) -> int:
        return len(self._shifts) - 1

    def step(self, plan: StepPlan) -> StepResult:
        self.thread = threading.get_ident()
        return super().step(plan)

    def load_adapter(self, slot: int, packed: FakePacked) -> None:
        assert self.thread in (0, threading.get_ident()), "slots change in the thread of the steps"
        super().load_adapter(slot, packed)
        self.most, self.num_loads = max(self.most, self.num_loaded), self.num_loads + 1


async def test_those_used_least_recently_make_room(tmp_path: Path) -> None:
    runner, known = Counting(), adapters(tmp_path, 3)
    engine = InflightEngine(runner, fake_engine().info, adapter_limits=AdapterLimits(2))
    for adapter in known:
        await asyncio.to_thread(engine.add_adapter, adapter)
    assert (runner.most, runner.num_loads) == (2, 3)
    for number, num_loads in ((2, 3), (1, 3), (0, 4), (1, 4), (2, 5)):
        digest = known[number].digest
        assert (await answer(engine, request(digest)))[0] == fake_answer(PROMPT, 12, adapter=digest)
        assert runner.num_loads == num_loads
    assert runner.most == 2
    engine.close()


async def test_bytes_are_limited_too(tmp_path: Path) -> None:
    """Two of three small adapters fit, one beside a large one that takes as much as two of them does not."""
    runner = Counting()
    small = adapters(tmp_path, 3)
    num_bytes = small[0].manifest.num_bytes
    large = sealed(tmp_path / "large", random_parts({"0.qkv": (8, 8), "1.qkv": (8, 8)}, ranks=(4,)))
    huge = sealed(tmp_path / "huge", random_parts({"0.qkv": (8, 8)}, ranks=(33,)))
    assert [large.manifest.num_bytes, huge.manifest.num_bytes > 2 * num_bytes] == [2 * num_bytes, True]
    engine = InflightEngine(runner, fake_engine().info, adapter_limits=AdapterLimits(num_bytes=2 * num_bytes))
    for adapter in (*small, large):
        await asyncio.to_thread(engine.add_adapter, adapter)
    assert (runner.num_loaded, runner.most, runner.num_loads) == (1, 2, 4), "the large one made two leave"
    with pytest.raises(InvalidArgument, match=r"takes 2,112 bytes of memory, .* larger --adapter-memory"):
        await asyncio.to_thread(engine.add_adapter, huge)
    async with aclosing(engine.submit(request(large.digest, 60))) as events:
        tokens = [*(await anext(events)).token_ids]
        with pytest.raises(ResourceExhausted, match="all 1 adapters that fit in memory are in use"):
            await answer(engine, request(small[0].digest))
        async for event in events:
            tokens += event.token_ids
    assert tokens == fake_answer(PROMPT, 60, adapter=large.digest)
    for adapter in small:
        assert (await answer(engine, request(adapter.digest)))[0] == fake_answer(PROMPT, 12, adapter=adapter.digest)
    assert (runner.num_loaded, runner.most) == (2, 2)
    engine.close()


async def test_none_is_dropped_while_it_is_used(tmp_path: Path) -> None:
    engine, known = fake_engine(step_delay_s=0.002, adapter_limits=AdapterLimits(1)), adapters(tmp_path, 2)
    for adapter in known:
        await asyncio.to_thread(engine.add_adapter, adapter)
    first, second = (adapter.digest for adapter in known)
    async with aclosing(engine.submit(request(first, 60))) as events:
        tokens = [*(await anext(events)).token_ids]
        with pytest.raises(ResourceExhausted, match="all 1 adapters that fit in memory are in use"):
            await answer(engine, request(second))
        async for event in events:
            tokens += event.token_ids
    assert tokens == fake_answer(PROMPT, 60, adapter=first)
    assert (await answer(engine, request(second)))[0] == fake_answer(PROMPT, 12, adapter=second)
    engine.close()


async def test_a_file_that_is_gone_ends_the_requests_that_need_it(tmp_path: Path) -> None:
    engine, known = fake_engine(adapter_limits=AdapterLimits(1)), adapters(tmp_path, 2)
    for adapter in known:
        await asyncio.to_thread(engine.add_adapter, adapter)
    (known[0].path / "weights.bin").unlink()
    with pytest.raises(InternalError, match=r"weights\.bin cannot be read"):  # nothing that the request can help
        await answer(engine, request(known[0].digest))
    assert (await answer(engine, request(known[1].digest)))[0] == fake_answer(PROMPT, 12, adapter=known[1].digest)
    engine.close()


@pytest.mark.parametrize("gone", [0, 1])
async def test_any_directory_of_an_adapter_will_do(tmp_path: Path, gone: int) -> None:
    """A copy under another name, or for the same one."""
    engine, (first, other) = fake_engine(adapter_limits=AdapterLimits(1)), adapters(tmp_path, 2)
    copy = SealedAdapter.open(shutil.copytree(first.path, tmp_path / "copy"))
    for adapter in (first, copy, other):
        await asyncio.to_thread(engine.add_adapter, adapter)
    shutil.rmtree((first, copy)[gone].path)
    for asked in (first, other, first):
        assert (await answer(engine, request(asked.digest)))[0] == fake_answer(PROMPT, 12, adapter=asked.digest)
    engine.close()


async def test_two_add_an_adapter_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower one's directory is known, too."""
    engine, (first, other) = fake_engine(adapter_limits=AdapterLimits(1)), adapters(tmp_path, 2)
    copy = SealedAdapter.open(shutil.copytree(first.path, tmp_path / "copy"))
    load, faster = AdapterPool._load, [copy]

    def overtaken(pool: AdapterPool, *arguments: Any) -> None:
        if faster:
            pool.add(faster.pop())
        load(pool, *arguments)

    monkeypatch.setattr(AdapterPool, "_load", overtaken)
    for adapter in (first, other):
        await asyncio.to_thread(engine.add_adapter, adapter)
    shutil.rmtree(copy.path)
    assert (await answer(engine, request(first.digest)))[0] == fake_answer(PROMPT, 12, adapter=first.digest)
    engine.close()


async def test_a_damaged_copy_is_said_when_it_is_loaded(tmp_path: Path) -> None:
    engine, (first,) = fake_engine(), adapters(tmp_path, 1)
    await asyncio.to_thread(engine.add_adapter, first)
    copy = SealedAdapter.open(shutil.copytree(first.path, tmp_path / "copy"))
    (copy.path / "weights.bin").write_bytes(b"")
    with pytest.raises(EngineFileError, match=r"copy: weights\.bin was changed"):
        await asyncio.to_thread(engine.add_adapter, copy)
    engine.close()


async def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    engine = fake_engine()
    parts = random_parts({"0.qkv": (8, 8)})
    with pytest.raises(EngineFileError, match="was built for the engine"):
        engine.add_adapter(sealed(tmp_path / "other", parts, "f" * 64))
    damaged = sealed(tmp_path / "damaged", parts)
    (damaged.path / "weights.bin").write_bytes(b"")
    with pytest.raises(EngineFileError, match="was changed"):
        engine.add_adapter(damaged)
    with pytest.raises(InvalidArgument, match="the engine has no adapter"):
        engine.submit(request(damaged.digest))
    engine.close()
    whole = sealed(tmp_path / "whole", parts)
    with pytest.raises(Unavailable):
        engine.add_adapter(whole)


def test_a_runner_without_adapters_says_so(tmp_path: Path) -> None:
    class Without:
        def __init__(self) -> None:
            self.info = FAKE_RUNNER_INFO

        def step(self, plan: StepPlan) -> StepResult:
            raise NotImplementedError

        def close(self) -> None:
            pass

    pool = AdapterPool(Without(), Posted().add, base_digest="0" * 64)
    with pytest.raises(Unsupported, match="only the cpu target does"):
        pool.add(adapters(tmp_path, 1)[0])


async def test_loads_and_unloads_under_32_streams(tmp_path: Path) -> None:
    """Nobody's answer is another's, and no slot is left over."""
    runner, known = Counting(), adapters(tmp_path, 6)
    engine = InflightEngine(runner, fake_engine().info, adapter_limits=AdapterLimits(40))
    for adapter in known[:2]:
        await asyncio.to_thread(engine.add_adapter, adapter)
    rng, done = random.Random(0), asyncio.Event()

    async def stream(number: int) -> int:
        count = 0
        while not done.is_set():
            digest = ("", known[0].digest, known[1].digest)[(number + count) % 3]
            prompt = PROMPT[: 5 + (number + count) % 12]
            tokens, _ = await answer(engine, request(digest, 20, prompt))
            assert tokens == fake_answer(prompt, 20, adapter=digest)
            count += 1
        return count

    streams = [asyncio.create_task(stream(number)) for number in range(32)]
    for _ in range(100):
        adapter = rng.choice(known[2:])
        await asyncio.to_thread(engine.add_adapter, adapter)
        using = asyncio.create_task(answer(engine, request(adapter.digest, 3)))
        await asyncio.sleep(0)  # its first pull
        engine.remove_adapter(adapter.digest)
        assert (await using)[0] == fake_answer(PROMPT, 3, adapter=adapter.digest)
    done.set()
    assert min(await asyncio.gather(*streams)) > 0
    engine.close()
    assert runner.num_loaded == 2
