"""Who belongs to a cluster, and who does not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from llmserve.cluster import members as watched
from llmserve.cluster.address import ClusterAddress
from llmserve.cluster.members import Members
from llmserve.cluster.own_requests import LAST, hello_chunk
from llmserve.engine.base import EngineInfo
from llmserve.engine.fake.runner import fake_engine


class FakeWorker:
    """`says`: what it answers; an exception is raised."""

    def __init__(self, says: dict[str, Any] | Exception) -> None:
        self.says = says
        self.hangs = False


class FakeClient:
    def __init__(self, **workers: FakeWorker) -> None:
        self.workers = dict(enumerate(workers.values(), 1))
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    def instance_ids(self) -> list[int]:
        return list(self.workers)

    async def direct(self, request: Any, instance_id: int, annotated: bool) -> AsyncIterator[Any]:
        worker = self.workers[instance_id]
        await self.may_answer.wait()
        if isinstance(worker.says, Exception):
            raise worker.says
        if worker.hangs:
            await asyncio.Event().wait()
        return chunks(worker.says)


async def chunks(says: dict[str, Any]) -> AsyncIterator[Any]:
    yield says
    yield dict(LAST)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ASK_S", "ASK_AGAIN_S", "ANSWER_S", "LEAVING_S"):
        monkeypatch.setattr(watched, name, 0.02)


def hello(**other: Any) -> dict[str, Any]:
    engine = fake_engine()
    engine._info = replace(engine.info, **other)
    try:
        return hello_chunk(engine)
    finally:
        engine.close()


def info() -> EngineInfo:
    engine = fake_engine()
    engine.close()
    return engine.info


async def until(client: FakeClient, members: Members, holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            members.look(client)
            await asyncio.sleep(0.005)


def ids(members: Members) -> list[int]:
    return sorted(worker.worker_id for worker in members.there())


@pytest.mark.usefixtures("quick")
async def test_another_engine_and_strangers_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient(
        one=FakeWorker(hello()),
        other=FakeWorker(hello(digest="other")),
        stranger=FakeWorker({"token_ids": [1], "index": 0, "finish_reason": "stop"}),
        dead=FakeWorker(ConnectionError("refused")),
    )
    members = Members(info(), ClusterAddress("dynamo", "demo"))
    await until(client, members, lambda: "does not answer: refused" in caplog.text and bool(ids(members)))
    await until(client, members, lambda: "is not used" in caplog.text and "not an llmserve worker" in caplog.text)
    assert ids(members) == [1]
    assert "worker 2 of the cluster dynamo.demo is not used: its engine is other" in caplog.text


@pytest.mark.usefixtures("quick")
async def test_one_that_hangs_is_lost_and_found_again(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient(one=FakeWorker(hello()))
    members = Members(info(), ClusterAddress("dynamo", "demo"))
    await until(client, members, lambda: ids(members) == [1])
    reader = asyncio.create_task(asyncio.sleep(60))
    members.there()[0].readers.add(reader)
    client.workers[1].hangs = True
    await until(client, members, lambda: ids(members) == [])
    await asyncio.wait({reader}, timeout=5)
    assert reader.cancelled(), "its answers go on elsewhere"
    assert "no message for 0.02 s" in caplog.text
    client.workers[1].hangs = False
    await until(client, members, lambda: ids(members) == [1])


async def test_a_stopped_worker_is_lost_within_three_seconds() -> None:
    assert watched.ASK_S + watched.ANSWER_S <= 3


@pytest.mark.usefixtures("quick")
async def test_one_whose_answers_come_is_not_lost_because_it_is_slow_to_say_who_it_is() -> None:
    client = FakeClient(one=FakeWorker(hello()))
    members = Members(info(), ClusterAddress("dynamo", "demo"))
    await until(client, members, lambda: ids(members) == [1])
    client.workers[1].hangs = True
    (worker,) = members.there()
    for _ in range(20):
        worker.heard_at = asyncio.get_running_loop().time() + 3600  # however busy this machine is
        members.look(client)
        await asyncio.sleep(0.01)
    assert members.there() == [worker]
    worker.heard_at = 0.0
    await until(client, members, lambda: ids(members) == [])


@pytest.mark.usefixtures("quick")
async def test_one_that_leaves_may_end_what_it_has_begun() -> None:
    client = FakeClient(one=FakeWorker(hello()))
    members = Members(info(), ClusterAddress("dynamo", "demo"))
    await until(client, members, lambda: ids(members) == [1])
    reader = asyncio.create_task(asyncio.sleep(0))
    (worker,) = members.there()
    worker.readers.add(reader)
    client.workers.clear()
    for _ in range(5):
        worker.heard_at = asyncio.get_running_loop().time()
        members.look(client)
        await asyncio.sleep(0.01)
    assert ids(members) == [1]
    worker.readers.clear()
    members.look(client)
    assert ids(members) == []


@pytest.mark.usefixtures("quick")
async def test_one_that_leaves_as_it_is_asked_may_end_what_it_has_begun() -> None:
    """It can't be asked because it has left, which `look` has not seen yet."""
    client = FakeClient(one=FakeWorker(hello()))
    members = Members(info(), ClusterAddress("dynamo", "demo"))
    await until(client, members, lambda: ids(members) == [1])
    has_failed = asyncio.Event()

    async def fail(request: Any, instance_id: int, annotated: bool) -> AsyncIterator[Any]:
        has_failed.set()
        raise ConnectionError("instance_id=1 not found")

    client.workers.clear()
    client.direct = fail  # type: ignore[method-assign]
    await asyncio.wait_for(has_failed.wait(), 60)
    assert ids(members) == [1]


@pytest.mark.usefixtures("quick")
async def test_one_that_leaves_and_hangs_is_lost() -> None:
    client = FakeClient(one=FakeWorker(hello()))
    members = Members(info(), ClusterAddress("dynamo", "demo"))
    await until(client, members, lambda: ids(members) == [1])
    reader = asyncio.create_task(asyncio.sleep(60))
    members.there()[0].readers.add(reader)
    client.workers.clear()
    await until(client, members, lambda: ids(members) == [])
    await asyncio.wait({reader}, timeout=5)
    assert reader.cancelled()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("num_turns", range(8))
async def test_who_leaves_while_it_answers_is_asked_no_more(num_turns: int) -> None:
    """Its answer and its end may meet in any turn of the loop."""
    client = FakeClient(one=FakeWorker(hello()))
    client.may_answer.clear()
    members = Members(info(), ClusterAddress("dynamo", "demo"))
    members.look(client)
    (asking,) = members._attended.values()
    await asyncio.sleep(0)
    client.may_answer.set()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    client.workers.clear()
    members.look(client)
    await asyncio.wait([asking], timeout=60)
    assert asking.cancelled()


async def test_workers_with_other_kernels_promise_nothing(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient(one=FakeWorker(hello(kernels="avx512")))
    members = Members(replace(info(), kernels=""), ClusterAddress("dynamo", "demo"))
    await until(client, members, lambda: ids(members) == [1])
    assert members.info.kernels == "avx512"
    with caplog.at_level(logging.WARNING):
        client.workers[2] = FakeWorker(hello(kernels="avx2"))
        await until(client, members, lambda: ids(members) == [1, 2])
    assert members.info.kernels == ""
    assert "computes with 'avx2', others with 'avx512'" in caplog.text


async def test_all_are_met_once_each_has_answered_or_has_not(quick: None) -> None:
    client = FakeClient(first=FakeWorker(hello()), last=FakeWorker(RuntimeError("it is starting")))
    members = Members(info(), ClusterAddress("dynamo", "demo"))
    answering, started = client.direct, asyncio.Event()

    async def later(request: Any, instance_id: int, annotated: bool) -> AsyncIterator[Any]:
        if instance_id == 2:
            await started.wait()
        return await answering(request, instance_id, annotated)

    client.direct = later  # type: ignore[method-assign]
    await until(client, members, lambda: bool(members.there()))
    assert not members.are_met.is_set()
    started.set()
    await until(client, members, members.are_met.is_set)
    assert [worker.worker_id for worker in members.there()] == [1]
