"""One engine on several devices: who answers, what is left when one fails, and limits that hold over all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

import pytest

from llmserve.core import GenerateRequest, Tenant, TokenEvent
from llmserve.engine.base import MeteringEngine
from llmserve.engine.budgets import TokenBudgets
from llmserve.engine.fake import FakeRunner, fake_answer
from llmserve.engine.inflight import InflightEngine
from llmserve.engine.replicas import ReplicatedEngine
from llmserve.errors import InternalError, InvalidArgument, RateLimited, Unavailable
from tests.engine.test_inflight import INFO, RecordingRunner, request, tokens_of, until


@contextmanager
def replicated(*runners: FakeRunner) -> Iterator[ReplicatedEngine]:
    budgets = TokenBudgets()
    engines = {f"GPU {number}": InflightEngine(runner, INFO, budgets=budgets) for number, runner in enumerate(runners)}
    engine = ReplicatedEngine(engines, budgets)
    try:
        yield engine
    finally:
        engine.close()
        assert all(runner.is_closed for runner in runners)


async def started(engine: ReplicatedEngine, asked: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
    stream = engine.submit(asked)
    await anext(stream)
    return stream


async def test_requests_go_where_the_fewest_answers_are_under_way() -> None:
    runners = [RecordingRunner(), RecordingRunner(), RecordingRunner()]
    with replicated(*runners) as engine:
        streams = [await started(engine, request(number, max_tokens=100)) for number in range(1, 7)]
        assert [len({chunk.sequence_id for plan in one.plans for chunk in plan.chunks}) for one in runners] == [2, 2, 2]
        for stream in streams[1::3]:  # those of the second
            await stream.aclose()
        before = len(runners[1].plans)
        assert await tokens_of(engine.submit(request(7, 8))) == fake_answer([7, 8], 5)
        assert len(runners[1].plans) > before
        for stream in streams:
            await stream.aclose()


async def test_every_device_gives_the_same_answers() -> None:
    with replicated(FakeRunner(), FakeRunner()) as engine:
        prompts = [[number, number + 1] for number in range(1, 20)]
        answers = await asyncio.gather(*(tokens_of(engine.submit(request(*prompt))) for prompt in prompts))
        assert answers == [fake_answer(prompt, 5) for prompt in prompts]


async def test_a_device_that_fails_is_taken_out_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    broken, sound = FakeRunner(fail_at_step=3), RecordingRunner()
    with replicated(broken, sound) as engine:
        lost = await started(engine, request(1, max_tokens=100))
        kept = await started(engine, request(2, max_tokens=100))
        with pytest.raises(InternalError, match="failed while computing a step"):
            await tokens_of(lost)
        await until(lambda: broken.is_closed)
        assert engine.healthy()
        assert await tokens_of(engine.submit(request(3, 4))) == fake_answer([3, 4], 5)
        assert await tokens_of(engine.submit(request(5))) == fake_answer([5], 5)
        assert len(await tokens_of(kept)) == 99
        stats = engine.stats()
        assert stats.num_failed_replicas == 1
        assert stats.max_num_blocks == sound.info.num_blocks
        told = [record for record in caplog.records if "gets no more requests" in record.message]
        assert [(record.levelno, record.args) for record in told] == [(logging.ERROR, ("GPU 0", 1, 2))]


async def test_when_all_devices_have_failed_it_says_so() -> None:
    with replicated(FakeRunner(fail_at_step=0), FakeRunner(fail_at_step=0)) as engine:
        for number in (1, 2):
            with pytest.raises(InternalError):
                await tokens_of(engine.submit(request(number)))
        assert not engine.healthy()
        with pytest.raises(Unavailable, match=r"failed on every device \(GPU 0, GPU 1\)"):
            engine.submit(request(1))
        assert engine.stats().num_failed_replicas == 2
        assert engine.stats().total_gen_tokens == 0


async def test_numbers_are_those_of_all_devices() -> None:
    with replicated(FakeRunner(), FakeRunner()) as engine:
        assert engine.stats().max_num_blocks == 2 * 256
        assert engine.stats().tokens_per_block == 4
        for number in range(4):
            await tokens_of(engine.submit(request(number, 1, 2)))
        await until(lambda: engine.stats().total_gen_tokens == 4 * 5)
        assert engine.stats().total_ctx_tokens == 4 * 3


async def test_what_no_device_takes_is_refused_at_once() -> None:
    with replicated(FakeRunner(), FakeRunner()) as engine, pytest.raises(InvalidArgument):
        engine.submit(request(*range(300)))


async def test_a_tenant_has_its_limits_once_and_not_on_each_device() -> None:
    tenant = Tenant("a", max_answers=2, tokens_per_minute=100)
    with replicated(FakeRunner(step_delay_s=0.001), FakeRunner(step_delay_s=0.001)) as engine:
        assert isinstance(engine, MeteringEngine)
        streams = [await started(engine, request(number, max_tokens=200, tenant=tenant)) for number in (1, 2)]
        assert engine.allowance(tenant).num_answers == 0
        with pytest.raises(
            RateLimited, match="'a' may have 2 answers running at once, but this request would make it 3"
        ):
            await tokens_of(engine.submit(request(3, tenant=tenant)))
        await streams[0].aclose()
        assert engine.allowance(tenant).num_answers == 1
        async with aclosing(streams[1]):
            num_tokens = len([event async for event in streams[1]])
        assert num_tokens == 199
        with pytest.raises(RateLimited, match="has used its 100 tokens per minute"):
            await tokens_of(engine.submit(request(3, tenant=tenant)))
        assert engine.allowance(tenant).num_tokens == 0
