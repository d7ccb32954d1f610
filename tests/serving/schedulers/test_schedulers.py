"""Requests over instances: order, batches, queue limits, timeouts, priorities, cancellation, in-flight backends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import Unavailable
from llmserve.serving.backend import Execution
from llmserve.serving.instruments.model_statistics import ModelStatistics, RequestTiming
from llmserve.serving.schedulers import queued_scheduler
from llmserve.serving.schedulers.base import Rejected
from llmserve.serving.schedulers.passthrough import PassThroughScheduler
from llmserve.serving.schedulers.queued_scheduler import QueuedScheduler
from llmserve.serving.signature import ModelSignature
from llmserve.serving.types import InferRequest, InferResponse
from tests.serving.instances import Client, Instance, QueueingOne, ReleasingOne, settle
from tests.serving.models import identity_config, request


def scheduler(*instances: Instance, config: str = "", statistics: ModelStatistics | None = None) -> QueuedScheduler:
    parsed: ModelConfig = text_format.Parse('name: "m"\n' + identity_config(config), ModelConfig())
    return QueuedScheduler(parsed, ModelSignature(parsed), instances, statistics or ModelStatistics("m", "1"))


BATCHING = "max_batch_size: 8 dynamic_batching { %s }"


async def test_direct_runs_one_at_a_time_in_order() -> None:
    instance = Instance()
    client = Client(scheduler(instance))
    await client.send("a", "b", "c")
    assert instance.batches == [["a"]]
    assert client.target.num_pending == 2
    instance.gate.set()
    await client.wait()
    assert instance.batches == [["a"], ["b"], ["c"]]
    assert client.ended == ["a", "b", "c"]
    assert client.timings["c"].queue_ns > client.timings["a"].queue_ns


async def test_requests_spread_over_instances() -> None:
    one, two = Instance("one"), Instance("two")
    client = Client(scheduler(one, two))
    await client.send("a", "b", "c")
    assert (one.batches, two.batches) == ([["a"]], [["b"]])
    two.gate.set()
    await settle()
    assert two.batches == [["b"], ["c"]]
    one.gate.set()
    await client.wait()


async def test_an_instance_with_a_line_gets_as_many_batches_as_it_has_room_for() -> None:
    instance = QueueingOne(room=3)
    client = Client(scheduler(instance))
    await client.send("a", "b", "c", "d", "e")
    assert instance.batches == [["a"], ["b"], ["c"]]
    instance.room = 1  # it has become slow: no more ahead
    instance.finish(Execution(0, 1))
    instance.finish(Execution(1, 2))
    assert len(instance.batches) == 3
    instance.finish(Execution(2, 3))
    assert instance.batches[3:] == [["d"]]
    instance.finish(Execution(3, 4))
    instance.gate.set()
    await client.wait()
    assert instance.batches[4:] == [["e"]]


async def test_nothing_is_run_ahead_where_another_instance_or_a_larger_batch_could_take_it() -> None:
    one, two = QueueingOne("one", room=3), QueueingOne("two", room=3)
    client = Client(scheduler(one, two))
    await client.send("a", "b", "c")
    assert (one.batches, two.batches) == ([["a"]], [["b"]])
    batching = QueueingOne(room=3)
    other = Client(scheduler(batching, config=BATCHING % ""))
    await other.send("a", "b", "c")
    assert batching.batches == [["a"]]
    batching.finish(Execution(0, 1))
    assert batching.batches == [["a"], ["b", "c"]]


async def test_an_instance_that_works_again_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queued_scheduler, "LOOK_AGAIN_S", 0.001)
    busy, dead = Instance("busy"), Instance("dead", works=False)
    client = Client(scheduler(busy, dead))
    await client.send("a", "b")
    assert (busy.batches, dead.batches) == ([["a"]], [])
    dead.works = True
    dead.gate.set()
    async with asyncio.timeout(60):
        while "b" not in client.ended:
            await settle()
    assert dead.batches == [["b"]]
    busy.gate.set()
    await client.wait()


async def test_time_in_the_line_of_an_instance_is_queue_time() -> None:
    instance, statistics = QueueingOne(room=2), ModelStatistics("m", "1")
    client = Client(scheduler(instance, statistics=statistics))
    await client.send("a", "b")
    await asyncio.sleep(0.03)
    now_ns = time.monotonic_ns()
    instance.finish(Execution(now_ns - 30_000_000, now_ns - 20_000_000))
    instance.finish(Execution(now_ns - 20_000_000, now_ns))
    instance.gate.set()
    await client.wait()
    assert statistics.batches[1].compute_infer.ns == 30_000_000
    a, b = client.timings["a"], client.timings["b"]
    assert b.queue_ns - a.queue_ns > 9_000_000
    assert a.infer_ns > b.infer_ns > 19_000_000


async def test_a_thread_that_begins_before_the_batch_counts_as_given_has_not_kept_it_waiting() -> None:
    instance, statistics = QueueingOne(), ModelStatistics("m", "1")
    client = Client(scheduler(instance, statistics=statistics))
    await client.send("a")
    instance.finish(Execution(0, 1))
    instance.gate.set()
    await client.wait()
    assert client.timings["a"].queue_ns >= 0
    statistics.message()


async def test_cancelled_in_the_queue_never_runs() -> None:
    instance = Instance()
    client = Client(scheduler(instance))
    await client.send("a", "b", "c")
    await client.cancel("b")
    assert client.target.num_pending == 1
    instance.gate.set()
    await client.wait()
    assert instance.batches == [["a"], ["c"]]


async def test_cancelled_in_the_moment_of_dispatch_never_runs() -> None:
    instance = Instance()
    client = Client(scheduler(instance))
    await client.send("a", "b", "c")
    client.tasks["b"].cancel()
    client.tasks["a"].cancel()  # frees the instance before b's task has seen its cancellation
    instance.gate.set()
    await client.wait()
    assert instance.batches == [["a"], ["c"]]


async def test_cancelling_a_running_request_closes_its_stream_and_frees_the_instance() -> None:
    instance = Instance()
    client = Client(scheduler(instance))
    await client.send("a", "b")
    await client.cancel("a")
    assert instance.closed == ["a"]
    assert instance.batches == [["a"], ["b"]]
    instance.gate.set()
    await client.wait()


async def test_instance_is_free_before_the_client_has_taken_the_answer() -> None:
    instance = Instance()
    instance.gate.set()
    target = scheduler(instance)
    async with aclosing(target.infer(request("m", request_id="slow"), RequestTiming())) as stream:
        assert (await anext(stream)).final
        client = Client(target)
        await client.send("quick")
        assert client.ended == ["quick"]


async def test_releasing_instance_says_itself_when_it_is_free() -> None:
    instance = ReleasingOne()
    statistics = ModelStatistics("m", "1")
    client = Client(scheduler(instance, statistics=statistics))
    await client.send("a", "b")
    await client.cancel("a")
    assert instance.batches == [["a"]]  # still running
    assert statistics.execution_count == 0
    instance.release()
    await settle()
    assert instance.batches == [["a"], ["b"]]
    assert statistics.execution_count == 1
    instance.gate.set()
    await client.wait()


async def test_dynamic_batches_form_from_what_is_queued() -> None:
    instance = Instance()
    statistics = ModelStatistics("m", "1")
    client = Client(scheduler(instance, config=BATCHING % "", statistics=statistics))
    await client.send("a", "b", "c", "d")
    assert instance.batches == [["a"]]
    instance.gate.set()
    await client.wait()
    assert instance.batches == [["a"], ["b", "c", "d"]]
    assert statistics.execution_count == 2
    assert {size: durations.compute_infer.count for size, durations in statistics.batches.items()} == {1: 1, 3: 1}


async def test_delay_collects_a_preferred_batch_and_a_lone_request_goes_after_it() -> None:
    instance = Instance()
    instance.gate.set()
    client = Client(
        scheduler(instance, config=BATCHING % "preferred_batch_size: 4 max_queue_delay_microseconds: 50000")
    )
    await client.send("a", "b", "c")
    assert instance.batches == []
    await client.send("d")
    assert instance.batches == [["a", "b", "c", "d"]]
    await client.send("e")
    assert instance.batches == [["a", "b", "c", "d"]]
    await client.wait()
    assert instance.batches[1:] == [["e"]]
    assert client.timings["e"].queue_ns > 40e6


async def test_shapes_that_differ_make_batches_of_their_own() -> None:
    instance = Instance()
    client = Client(scheduler(instance, config=BATCHING % ""))
    await client.send("a", "b")
    await client.send("c", width=2)
    instance.gate.set()
    await client.wait()
    assert instance.batches == [["a"], ["b"], ["c"]]


async def test_one_of_a_batch_is_cancelled() -> None:
    instance = Instance()
    client = Client(
        scheduler(instance, config=BATCHING % "preferred_batch_size: 2 max_queue_delay_microseconds: 1000000")
    )
    await client.send("a", "b")
    assert instance.batches == [["a", "b"]]
    await client.cancel("a")
    assert instance.closed == ["a"]
    await client.send("c", "d")
    assert len(instance.batches) == 1  # b still runs
    instance.gate.set()
    await client.wait()
    assert client.ended == ["b", "c", "d"]


async def test_full_queue_refuses() -> None:
    instance = Instance()
    client = Client(scheduler(instance, config=BATCHING % "default_queue_policy { max_queue_size: 1 }"))
    await client.send("a")
    await client.send("b")
    await client.send("c")
    assert isinstance(client.error("c"), Rejected)
    assert str(client.error("c")) == "[request id: c] Exceeds maximum queue size"
    instance.gate.set()
    await client.wait()
    assert client.ended == ["a", "b"]


async def test_queue_timeout_refuses_waiting_requests_only() -> None:
    instance = Instance()
    policy = "default_queue_policy { default_timeout_microseconds: 20000 }"
    client = Client(scheduler(instance, config=BATCHING % policy))
    await client.send("a", "b")
    async with asyncio.timeout(30):
        await asyncio.wait([client.tasks["b"]])
    assert isinstance(client.error("b"), Unavailable)
    assert str(client.error("b")) == "[request id: b] Request timeout expired"
    instance.gate.set()
    await client.wait()
    assert client.ended == ["a"]


async def test_delayed_requests_run_after_the_others() -> None:
    instance = Instance()
    policy = "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 10000 }"
    client = Client(scheduler(instance, config=f"max_batch_size: 1 dynamic_batching {{ {policy} }}"))
    await client.send("a", "late")
    await asyncio.sleep(0.03)
    await client.send("b")
    instance.gate.set()
    await client.wait()
    assert client.ended == ["a", "b", "late"]


@pytest.mark.parametrize("action", ["DELAY", "REJECT"])
async def test_what_a_late_request_has_held_back_goes_when_its_time_is_over(action: str) -> None:
    instance = Instance()
    instance.gate.set()
    policy = f"timeout_action: {action} default_timeout_microseconds: 600000000 allow_timeout_override: true"
    batching = (
        f"preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 900000000 default_queue_policy {{ {policy} }}"
    )
    client = Client(scheduler(instance, config=f"max_batch_size: 8 dynamic_batching {{ {batching} }}"))
    await client.send("late", timeout_us=300_000)
    await client.send("a", "b", rows=2)
    assert client.ended == []
    await asyncio.wait_for(asyncio.gather(client.tasks["a"], client.tasks["b"]), 30)
    assert client.ended == ["a", "b"]


async def test_priorities() -> None:
    instance = Instance()
    config = "max_batch_size: 1 dynamic_batching { priority_levels: 3 default_priority_level: 2 }"
    client = Client(scheduler(instance, config=config))
    await client.send("running", "default")
    await client.send("low", priority=3)
    await client.send("high", priority=1)
    instance.gate.set()
    await client.wait()
    assert client.ended == ["running", "high", "default", "low"]


async def test_levels_that_nobody_uses_take_no_memory() -> None:
    instance = Instance()
    config = f"max_batch_size: 1 dynamic_batching {{ priority_levels: {2**64 - 1} default_priority_level: {2**32} }}"
    client = Client(scheduler(instance, config=config))
    await client.send("running", "default")
    await client.send("lowest", priority=2**64 - 1)
    await client.send("high", priority=1)
    instance.gate.set()
    await client.wait()
    assert client.ended == ["running", "high", "default", "lowest"]


async def test_preserved_ordering_holds_back_faster_answers() -> None:
    slow, quick = Instance("slow"), Instance("quick")
    client = Client(scheduler(slow, quick, config="max_batch_size: 1 dynamic_batching { preserve_ordering: true }"))
    await client.send("a", "b")
    quick.gate.set()
    await settle()
    assert client.ended == []
    slow.gate.set()
    await client.wait()
    assert client.ended == ["a", "b"]


async def test_stop_refuses_what_waits_and_what_comes() -> None:
    instance = Instance()
    client = Client(scheduler(instance))
    await client.send("a", "b")
    await client.target.stop()
    await client.send("c")
    instance.gate.set()
    await client.wait()
    assert client.ended == ["a"]
    assert isinstance(client.error("b"), Rejected)
    assert isinstance(client.error("c"), Rejected)


async def test_error_in_execute_fails_the_batch_and_not_the_scheduler() -> None:
    class Broken(Instance):
        def execute(self, requests: Sequence[InferRequest]) -> Sequence[AsyncGenerator[InferResponse, None]]:
            raise RuntimeError("boom")

    client = Client(scheduler(Broken()))
    await client.send("a")
    await client.send("b")
    assert [str(client.error(name)) for name in "ab"] == ["boom", "boom"]


async def test_pass_through_takes_everything_at_once_and_fills_the_least_busy_instance() -> None:
    one, two = Instance("one"), Instance("two")
    statistics = ModelStatistics("m", "1")
    client = Client(PassThroughScheduler((one, two), statistics, lambda _: 1))
    await client.send("a", "b", "c")
    assert (one.batches, two.batches) == ([["a"], ["c"]], [["b"]])
    await client.cancel("a")
    assert one.closed == ["a"]
    one.gate.set()
    two.gate.set()
    await client.wait()
    assert client.ended == ["b", "c"] or client.ended == ["c", "b"]
    assert statistics.execution_count == 3


async def test_what_an_engine_refuses_is_no_execution() -> None:
    class Refusing(Instance):
        async def _respond(self, wanted: InferRequest) -> AsyncGenerator[InferResponse, None]:
            if wanted.request_id == "b":
                raise Unavailable("it is being restarted")
            yield InferResponse("m", "1", wanted.request_id, error=Unavailable("the queue is full"), final=True)

    statistics = ModelStatistics("m", "1")
    client = Client(PassThroughScheduler((Refusing(),), statistics, lambda _: 1))
    await client.send("a", "b")
    await client.wait()
    assert statistics.execution_count == 0


async def test_responses_stop_the_instance_until_they_are_read() -> None:
    """Back-pressure: a stream is pulled, never run ahead of its reader."""
    instance = Instance(num_responses=3)
    instance.gate.set()
    target = scheduler(instance)
    async with aclosing(target.infer(request("m", request_id="a"), RequestTiming())) as stream:
        await anext(stream)
        await settle()
        assert instance.closed == []
    assert instance.closed == ["a"]


async def test_instances_that_have_died_get_nothing_while_another_works() -> None:
    dead, alive = Instance("dead", works=False), Instance("alive")
    client = Client(scheduler(dead, alive))
    await client.send("a", "b")
    assert (dead.batches, alive.batches) == ([], [["a"]])
    alive.gate.set()
    await client.wait()
    alive.works = False
    dead.gate.set()
    await client.send("c")  # all are dead: one of them says why
    await client.wait()
    assert dead.batches == [["c"]]


async def test_execute_with_the_wrong_number_of_streams_fails_the_batch_and_not_the_scheduler() -> None:
    class Short(Instance):
        def execute(self, requests: Sequence[InferRequest]) -> Sequence[AsyncGenerator[InferResponse, None]]:
            return super().execute(requests)[1:] if requests[0].request_id == "a" else super().execute(requests)

    instance = Short()
    instance.gate.set()
    client = Client(scheduler(instance))
    await client.send("a", "b")
    await client.wait()
    assert str(client.error("a")) == "model instance 'i' returned 0 streams for 1 requests"
    assert client.ended == ["b"]


async def test_many_requests_that_fail_at_once_are_no_recursion() -> None:
    class Broken(Instance):
        def execute(self, requests: Sequence[InferRequest]) -> Sequence[AsyncGenerator[InferResponse, None]]:
            if self.gate.is_set():
                raise RuntimeError("boom")
            return super().execute(requests)

    instance = Broken()
    client = Client(scheduler(instance))
    await client.send(*map(str, range(2000)))
    instance.gate.set()
    await client.wait()
    assert {str(client.error(str(i))) for i in range(1, 2000)} == {"boom"}
