"""Resources that instances of all models share, turns by priority, and the flags."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import InvalidArgument
from llmserve.serving.config.model_config import fill_defaults
from llmserve.serving.core import InferenceCore, ServerSettings
from llmserve.serving.instruments.model_statistics import ModelStatistics
from llmserve.serving.schedulers.queued_scheduler import QueuedScheduler
from llmserve.serving.schedulers.rate_limiter import RateLimiter, make_rate_limiter
from llmserve.serving.schedulers.shared import SharedResources
from llmserve.serving.signature import ModelSignature
from llmserve.serving.types import InferRequest, InferResponse, Tensor
from tests.serving.instances import Client, Instance, settle
from tests.serving.models import BACKENDS, floats, identity_config, request, serving, single, write_model


def limited(needs: int, priority: int = 1, count: int = 1, resource: str = "R") -> str:
    limiter = f'rate_limiter {{ resources [ {{ name: "{resource}" count: {needs} }} ] priority: {priority} }}'
    return f"instance_group {{ count: {count} {limiter} }}"


def client(limiter: RateLimiter | None, *instances: Instance, group: str = "") -> Client:
    config = text_format.Parse('name: "m"\n' + identity_config(group), ModelConfig())
    fill_defaults(config)
    for index, instance in enumerate(instances):
        instance.name = f"m_0_{index}"
    shared = SharedResources(rate_limiter=limiter)
    signature = ModelSignature(config)
    return Client(QueuedScheduler(config, signature, instances, ModelStatistics("m", "1"), shared))


async def test_instances_whose_needs_do_not_fit_together_take_turns() -> None:
    one, two = Instance(), Instance()
    target = client(RateLimiter({"R": 2}), one, two, group=limited(2, count=2))
    await target.send("a", "b", "c")
    assert one.batches + two.batches == [["a"]]
    one.gate.set()
    two.gate.set()
    await target.wait()
    assert target.ended == ["a", "b", "c"]


async def test_resources_are_shared_between_models_and_as_large_as_the_largest_need() -> None:
    limiter = RateLimiter()
    big, small = Instance(), Instance()
    of_big, of_small = client(limiter, big, group=limited(3)), client(limiter, small, group=limited(2))
    await of_big.send("a")
    await of_small.send("b")
    assert (big.batches, small.batches) == ([["a"]], [])
    big.gate.set()
    small.gate.set()
    await of_big.wait()
    await of_small.wait()
    assert small.batches == [["b"]]


async def test_other_resources_and_unlimited_models_run_at_the_same_time() -> None:
    limiter = RateLimiter({"R": 1, "Q": 1})
    instances = [Instance() for _ in range(3)]
    groups = (limited(1), limited(1, resource="Q"), "")
    for instance, group in zip(instances, groups, strict=True):
        await client(limiter, instance, group=group).send("a")
    assert [instance.batches for instance in instances] == [[["a"]]] * 3


async def test_priority_two_runs_half_as_often() -> None:
    limiter = RateLimiter()
    order: list[str] = []

    def noting(label: str) -> Instance:
        def answer(wanted: InferRequest) -> tuple[Tensor, ...]:
            order.append(label)
            return ()

        return Instance(answer=answer)

    first, second = noting("first"), noting("second")
    clients = [client(limiter, first, group=limited(1)), client(limiter, second, group=limited(1, priority=2))]
    for target in clients:
        await target.send(*map(str, range(12)))
    first.gate.set()
    second.gate.set()
    for target in clients:
        await target.wait()
    assert order[:9].count("first") == 6
    assert len(order) == 24


async def test_what_is_granted_and_not_used_goes_to_others() -> None:
    limiter = RateLimiter()
    one, two = Instance(), Instance()
    of_one, of_two = client(limiter, one, group=limited(1)), client(limiter, two, group=limited(1))
    await of_one.send("a")
    await of_two.send("b")
    await of_two.cancel("b")  # its claim stays staged
    await of_one.send("c")
    one.gate.set()
    await of_one.wait()
    assert one.batches == [["a"], ["c"]]
    assert two.batches == []


async def test_an_instance_that_has_died_keeps_nothing_that_was_granted() -> None:
    limiter = RateLimiter({"R": 1})
    other, dead, alive = Instance(), Instance(), Instance(works=False)
    of_other = client(limiter, other, group=limited(1))
    await of_other.send("a")
    of_both = client(limiter, dead, alive, group=limited(1, count=2))
    await of_both.send("b")  # the claim of one is staged
    dead.works, alive.works = False, True
    other.gate.set()
    alive.gate.set()
    await of_other.wait()
    await of_both.wait()
    assert (dead.batches, alive.batches) == ([], [["b"]])


async def test_unloaded_model_holds_nothing() -> None:
    limiter = RateLimiter({"R": 1})
    one, two = Instance(), Instance()
    of_one, of_two = client(limiter, one, group=limited(1)), client(limiter, two, group=limited(1))
    await of_one.send("a")
    await of_two.send("b")
    await of_one.target.stop()
    assert two.batches == []  # a still runs
    one.gate.set()
    await of_one.wait()
    await settle()
    assert two.batches == [["b"]]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=6), st.integers(4, 6))
def test_never_more_than_there_is_and_everybody_gets_a_turn(models: list[tuple[int, int]], size: int) -> None:
    async def play() -> None:
        limiter = RateLimiter({"R": size})
        in_use = 0

        class Counting(Instance):
            needs = 0

            def execute(self, requests: Sequence[InferRequest]) -> Sequence[AsyncGenerator[InferResponse, None]]:
                nonlocal in_use
                in_use += self.needs
                assert in_use <= size
                return super().execute(requests)

            def end(self, wanted: InferRequest) -> tuple[Tensor, ...]:
                nonlocal in_use
                in_use -= self.needs
                return ()

        instances, clients = [], []
        for needs, priority in models:
            instance = Counting()
            instance.needs, instance.answer = needs, instance.end
            instances.append(instance)
            clients.append(client(limiter, instance, group=limited(needs, priority)))
            await clients[-1].send("a", "b", "c")
        for instance in instances:
            instance.gate.set()
        for target in clients:
            await target.wait()
            assert target.ended == ["a", "b", "c"]
        assert in_use == 0

    asyncio.run(play())


async def test_model_that_could_never_run_is_refused_at_load(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config(limited(4)))
    write_model(tmp_path, "fits", identity_config(limited(1)))
    limits: dict[str, Any] = {"rate_limit": "execution_count", "rate_limit_resources": ("R:1",)}
    async with serving(tmp_path, **limits) as core:
        (reason,) = [row.reason for row in core.repository_index() if row.name == "m"]
        assert (await single(core, request("fits", floats(1)))).error is None
    assert (
        'Resource count for "R" is limited to 1 which will prevent scheduling of one or more model instances, the '
        "minimum required count is 4" in reason
    )


async def test_without_the_flag_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path, "m", identity_config(limited(4)))
    with caplog.at_level(logging.WARNING):
        async with serving(tmp_path) as core:
            assert core.ready()
    assert (
        "model 'm': rate_limiter has no effect: start the server with --rate-limit execution_count" in caplog.messages
    )


def test_flags(tmp_path: Path) -> None:
    assert make_rate_limiter("off", ["R:1"]) is None
    assert make_rate_limiter("execution_count", ["R:1", "Q:2:0"]) is not None
    with pytest.raises(InvalidArgument, match="--rate-limit sometimes: expected off or execution_count"):
        make_rate_limiter("sometimes", [])
    with pytest.raises(InvalidArgument) as caught:
        InferenceCore(ServerSettings((tmp_path,), rate_limit_resources=("R", "R:x", "R:1:1")), BACKENDS)
    assert "(3 problems)" in str(caught.value)
    assert "R:1:1: device 1 does not exist" in str(caught.value)
