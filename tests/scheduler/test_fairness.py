"""Tenants that compete: each has its share at once, whatever the others send, and nobody starves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.core import GenerateRequest, SamplingParams, Tenant
from llmserve.engine.base import RunnerInfo
from llmserve.scheduler.fairness import has_queue_share
from llmserve.scheduler.settings import Policy, SchedulerConfig, SchedulerSettings
from tests.scheduler.harness import Bench
from tests.scheduler.test_properties import MAX_LENGTH, limits, requests, scheduler_settings

FLOOD, OTHER = Tenant("flood"), Tenant("other")
ROOMY = RunnerInfo(vocab_size=7, block_size=4, num_blocks=128, max_num_tokens=32, max_batch_size=8, max_seq_len=64)
TIGHT = replace(ROOMY, num_blocks=48)
policies = pytest.mark.parametrize("policy", Policy)


def bench_of(policy: Policy, info: RunnerInfo = ROOMY) -> Bench:
    return Bench(info, SchedulerSettings(policy=policy, max_queue_size=0))


def running_of(bench: Bench) -> Counter[str]:
    return Counter(sequence.tenant.name for sequence in bench.scheduler.running.values())


def flood(bench: Bench, tenant: Tenant, count: int, *, prompt: int = 20, answer: int = 40) -> list[int]:
    sampling = SamplingParams(max_tokens=answer, temperature=0.0)
    return [bench.add([i % 7] * prompt, sampling, tenant=tenant)[0] for i in range(count)]


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(requests(), st.sampled_from([("a", 1.0), ("b", 1.0), ("c", 0.5), ("d", 4.0)]), st.integers(0, 4)),
        min_size=1,
        max_size=10,
    ),
    limits(),
    scheduler_settings,
)
def test_everything_ends_with_the_same_answers(
    arrivals: list[tuple[GenerateRequest, tuple[str, float], int]], info: RunnerInfo, options: SchedulerSettings
) -> None:
    bench = Bench(info, options)
    for request, tenant, num_steps_between in arrivals:
        bench.submit(replace(request, tenant=Tenant(*tenant)))
        for _ in range(num_steps_between):
            bench.step()
    bench.run(4 * len(bench.sequences) ** 2 * MAX_LENGTH + 1)
    bench.assert_answers()
    assert len(bench.reasons) == len(bench.sequences)


@policies
@pytest.mark.parametrize("info", [ROOMY, TIGHT], ids=["places", "blocks"])
@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(0, 30), st.integers(1, 60), st.integers(1, 40))
def test_a_flood_delays_nobody_else(
    policy: Policy, info: RunnerInfo, num_flood: int, num_steps: int, prompt: int, flood_prompt: int
) -> None:
    """The first token comes within the own prompt's steps and two more, then one with each step."""
    bench = bench_of(policy, info)
    flood(bench, FLOOD, num_flood, prompt=flood_prompt, answer=64 - flood_prompt)
    for _ in range(num_steps):
        bench.step()
    [own] = bench.add([3] * prompt, SamplingParams(max_tokens=4, temperature=0.0), tenant=OTHER)
    for _ in range(-(-prompt // (info.max_num_tokens - info.max_batch_size)) + 2):
        bench.step()
    assert bench.answers[own]
    while own not in bench.reasons:
        before = len(bench.answers[own])
        bench.step()
        assert len(bench.answers[own]) == before + 1 or own in bench.reasons
    bench.run()
    bench.assert_answers()


@policies
def test_who_has_more_than_is_fair_gives_way_and_nobody_else(policy: Policy) -> None:
    bench = bench_of(policy)
    flood(bench, FLOOD, 20)
    for _ in range(6):
        bench.step()
    assert running_of(bench) == {"flood": 8}
    others = flood(bench, OTHER, 20)
    for _ in range(6):
        bench.step()
    assert running_of(bench) == {"flood": 4, "other": 4}
    third = flood(bench, Tenant("third"), 1)
    bench.step()
    assert running_of(bench)["third"] == 1
    assert running_of(bench)["flood"] >= 3
    assert all(bench.sequences[i].num_displaced == 0 for i in third)
    running = [i for i in others if i in bench.scheduler.running]
    assert running == others[: len(running)]  # the last ones gave way
    bench.run()
    bench.assert_answers()
    told = {i: usage.num_preemptions for i, events in bench.events.items() if (usage := events[-1].usage)}
    assert told.keys() == bench.sequences.keys()
    assert sum(told.values()) == bench.scheduler.num_preemptions > 0
    assert not any(told[i] for i in third)


@policies
@pytest.mark.parametrize(("weight", "expected"), [(1.0, 4), (3.0, 6), (7.0, 7)])
def test_shares_follow_weights(policy: Policy, weight: float, expected: int) -> None:
    bench = bench_of(policy)
    flood(bench, FLOOD, 40)
    flood(bench, Tenant("heavy", weight), 40)
    counts = []
    for _ in range(60):
        bench.step()
        counts.append(running_of(bench)["heavy"])
    assert expected - 0.5 <= sum(counts[10:]) / len(counts[10:]) <= expected + 0.5


def test_the_last_of_the_largest_is_preempted_when_blocks_run_out() -> None:
    """Under `max_utilization` answers outgrow the pool; a tenant with a tenth of it keeps its sequence."""
    bench = bench_of(Policy.MAX_UTILIZATION, replace(ROOMY, num_blocks=40))
    [small] = bench.add([1] * 4, SamplingParams(max_tokens=50, temperature=0.0), tenant=OTHER)
    flood(bench, FLOOD, 8, prompt=4, answer=50)
    table = None
    while small not in bench.reasons:
        bench.step()
        if table is not None and small in bench.scheduler.running:
            assert bench.sequences[small].block_table is table
        table = bench.sequences[small].block_table
    assert bench.num_preemptions > 0
    bench.run()
    bench.assert_answers()


@policies
def test_a_request_that_takes_nearly_all_blocks_ends_though_others_come_without_end(policy: Policy) -> None:
    bench = bench_of(policy, replace(ROOMY, num_blocks=17, max_seq_len=64))
    [large] = bench.add([2] * 40, SamplingParams(max_tokens=20, temperature=0.0), tenant=FLOOD)
    for _ in range(2000):
        if large in bench.reasons:
            break
        bench.add([3] * 8, SamplingParams(max_tokens=2, temperature=0.0), tenant=OTHER)
        bench.step()
    assert large in bench.reasons
    bench.run()
    bench.assert_answers()


@pytest.mark.parametrize(("weight", "room"), [(1.0, 6), (3.0, 9), (0.2, 2)])
def test_a_full_queue_takes_what_a_share_of_it_has_room_for(weight: float, room: int) -> None:
    config = SchedulerConfig(4, 32, 16, 4, 64, SchedulerSettings(max_queue_size=8))  # 12 with what runs
    tenant = Tenant("late", weight)
    assert has_queue_share(tenant, room, {FLOOD: 12}, config)
    assert not has_queue_share(tenant, room + 1, {FLOOD: 12}, config)
    assert not has_queue_share(tenant, 1, {FLOOD: 12, tenant: room}, config)
    assert not has_queue_share(FLOOD, 1, {FLOOD: 12}, config)  # alone, the queue is as long as it is
    assert not has_queue_share(FLOOD, 1, {FLOOD: 12, tenant: 1}, config)


def test_who_comes_back_has_saved_nothing_up() -> None:
    """Two tenants take turns for one place, from the moment at which both want it."""
    bench = bench_of(Policy.GUARANTEED_NO_EVICT, replace(ROOMY, max_batch_size=1))
    flood(bench, FLOOD, 30, answer=2)
    for _ in range(20):
        bench.step()
    others = flood(bench, OTHER, 10, answer=2)
    started = []
    while any(i not in bench.reasons for i in others):
        bench.step()
        started += [sequence.tenant.name for sequence in bench.scheduler.running.values()]
    turns = [name for i, name in enumerate(started) if i == 0 or started[i - 1] != name]
    assert turns[:6] in (["flood", "other"] * 3, ["other", "flood"] * 3)


@policies
@pytest.mark.parametrize("num_live", [1, 3, 7])
def test_work_of_little_weight_gives_up_every_place_but_one(policy: Policy, num_live: int) -> None:
    """As batches have it: each live request has its first token within its prompt's step and two more."""
    bench = bench_of(policy)
    flood(bench, Tenant("batch", 0.001), 40)
    for _ in range(12):
        bench.step()
    assert running_of(bench)["batch"] == ROOMY.max_batch_size
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    live = [bench.add([3] * 4, sampling, tenant=Tenant("live"))[0] for _ in range(num_live)]
    for _ in range(3):
        bench.step()
    assert all(bench.answers[own] for own in live)
    assert running_of(bench)["batch"] >= 1  # which goes on, or a batch would never end beside live requests


@policies
def test_work_of_little_weight_makes_no_step_longer_than_a_full_batch(policy: Policy) -> None:
    bench = bench_of(policy)
    [live] = bench.add([3] * 4, SamplingParams(max_tokens=40, temperature=0.0), tenant=Tenant("live"))
    bench.step()
    batch = flood(bench, Tenant("batch", 0.001), 60, answer=2)
    sizes = []
    while live not in bench.reasons:
        plan = bench.step()
        assert plan is not None
        sizes.append(plan.num_tokens)
    assert max(sizes) == ROOMY.max_batch_size
    assert sum(own in bench.reasons for own in batch) > 10, "and it goes on"
    plan = bench.step()
    assert plan is not None
    assert plan.num_tokens > ROOMY.max_batch_size, "by itself it may take the whole step"
    bench.run(1000)
