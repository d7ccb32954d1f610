"""Limits of tenants: how many answers they have under way, and tokens in a minute."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from llmserve.core import Allowance, GenerateRequest, SamplingParams, Tenant
from llmserve.engine.budgets import TokenBudgets
from llmserve.engine.fake import FakeRunner
from llmserve.errors import InvalidArgument, RateLimited, ResourceExhausted
from llmserve.tenant_counters import TOKENS_PER_MINUTE
from tests.engine.test_inflight import RecordingRunner, opened, until


def test_tokens_come_back_evenly_and_are_not_saved_up() -> None:
    now = 0.0
    budgets = TokenBudgets(lambda: now)
    tenant = Tenant("a", tokens_per_minute=60)
    budgets.check(tenant)
    budgets.charge(tenant, 59)
    budgets.check(tenant)
    budgets.charge(tenant, 21)  # more than is left
    with pytest.raises(RateLimited, match="'a' has used its 60 tokens per minute") as caught:
        budgets.check(tenant)
    assert caught.value.retry_after_s == pytest.approx(21)
    now = 19.0
    with pytest.raises(RateLimited):
        budgets.check(tenant)
    now = 21.0
    budgets.check(tenant)
    now = 10_000.0
    budgets.charge(tenant, 60)
    with pytest.raises(RateLimited):
        budgets.check(tenant)
    budgets.check(Tenant("b", tokens_per_minute=60))


def test_an_error_that_is_put_somewhere_keeps_what_it_knows() -> None:
    placed = RateLimited("no tokens", limit=TOKENS_PER_MINUTE, retry_after_s=7.5).at("in ensemble 'e'")
    assert (type(placed), str(placed), placed.retry_after_s) == (RateLimited, "in ensemble 'e', no tokens", 7.5)
    assert placed.limit == TOKENS_PER_MINUTE


async def test_an_engine_keeps_both_limits() -> None:
    with opened() as engine:

        def request(tenant: Tenant, num_sequences: int = 1) -> GenerateRequest:
            sampling = SamplingParams(max_tokens=4, temperature=0.0)
            return GenerateRequest("r", (1, 2, 3), sampling, num_sequences=num_sequences, tenant=tenant)

        few = Tenant("few", max_answers=2)
        with pytest.raises(InvalidArgument, match="may have 2 answers running at once, but this request asks for 3"):
            await anext(engine.submit(request(few, 3)))
        async with aclosing(engine.submit(request(few, 2))) as stream:
            await anext(stream)
            with pytest.raises(RateLimited, match="2 answers running at once, but this request would make it 4"):
                await anext(engine.submit(request(few, 2)))
            assert [event async for event in stream]
        metered = Tenant("metered", tokens_per_minute=5)
        async with aclosing(engine.submit(request(metered))) as stream:
            assert sum([len(event.token_ids) async for event in stream]) == 4
        with pytest.raises(RateLimited, match="has used its 5 tokens") as caught:
            await anext(engine.submit(request(metered)))
        assert 30 < caught.value.retry_after_s <= 36
        async with aclosing(engine.submit(request(Tenant("other")))) as stream:
            assert [event async for event in stream]


async def test_an_answer_that_its_client_has_left_no_longer_counts() -> None:
    """Though the step that computes it goes on."""
    tenant = Tenant("one", max_answers=1)
    sampling = SamplingParams(max_tokens=50, temperature=0.0)
    asked = GenerateRequest("r", (1, 2, 3), sampling, tenant=tenant)
    with opened(FakeRunner(step_delay_s=0.05)) as engine:
        for _ in range(3):
            async with aclosing(engine.submit(asked)) as stream:
                await anext(stream)
                with pytest.raises(RateLimited):
                    await anext(engine.submit(asked))


async def test_what_the_queue_refuses_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise ResourceExhausted("the queue is full")

    tenant = Tenant("metered", tokens_per_minute=5)
    asked = GenerateRequest("r", (1,) * 6, SamplingParams(max_tokens=1, temperature=0.0), tenant=tenant)
    with opened() as engine:
        with monkeypatch.context() as patched:
            patched.setattr(engine, "_check_room", full)
            for _ in range(3):
                with pytest.raises(ResourceExhausted, match="full"):
                    await anext(engine.submit(asked))
        async with aclosing(engine.submit(asked)) as stream:
            assert [event async for event in stream]
        with pytest.raises(RateLimited):
            await anext(engine.submit(asked))


async def test_an_engine_tells_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = RecordingRunner()
    tenant = Tenant("a", max_answers=5, tokens_per_minute=60)
    asked = GenerateRequest(
        "r", (1, 2, 3), SamplingParams(max_tokens=4, temperature=0.0), num_sequences=2, tenant=tenant
    )
    with opened(runner) as engine:
        monkeypatch.setattr(engine, "_budgets", TokenBudgets(lambda: 0.0))  # nothing comes back
        assert engine.allowance(tenant) == Allowance(5, 60, 0.0)
        runner.gate.clear()
        stream = engine.submit(asked)
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: runner.plans)
        assert engine.allowance(tenant) == Allowance(3, 57, 3.0)
        assert engine.allowance(Tenant("b", max_answers=1)) == Allowance(1, 0, 0.0)
        runner.gate.set()
        await first
        async with aclosing(stream):
            assert [event async for event in stream]
        assert engine.allowance(tenant).num_tokens == 60 - 3 - 2 * 4
        await until(lambda: engine.allowance(tenant).num_answers == 5)
        budget = Tenant("c", tokens_per_minute=2)
        async with aclosing(engine.submit(replace(asked, tenant=budget))) as stream:
            assert [event async for event in stream]
        assert engine.allowance(budget) == Allowance(0, 0, 60 * 11 / 2)
