"""Iterative sequences: requests that a model has run again and again, in batches that change between executions."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.errors import InvalidArgument
from llmserve.serving.schedulers.base import Rejected
from tests.serving.instances import Client, Instance, settle
from tests.serving.schedulers.test_sequences import (
    CONTROLS,
    Conversation,
    add_up,
    opened,
    scalars,
    scheduler,
    sum_state,
)

ITERATIVE = "iterative_sequence: true "


def controls_of(instance: Instance, name: str, *controls: str) -> list[list[Any]]:
    """In every execution of a request."""
    runs = [wanted for batch in instance.requests for wanted in batch if wanted.request_id == name]
    return [scalars(wanted, *controls) for wanted in runs]


async def test_iterative_request_runs_until_the_model_lets_it_go() -> None:
    (instance,) = opened(Instance(rounds={"a": 2, "c": 1}, num_responses=2))
    client = Client(scheduler(instance, batching=ITERATIVE + CONTROLS, max_batch_size=1))
    await client.send("a", "b", "c")
    await client.wait()
    assert instance.batches == [["a"], ["a"], ["a"], ["b"], ["c"], ["c"]]
    assert client.ended == ["a", "b", "c"]
    assert [len(client.responses[name]) for name in "abc"] == [4, 2, 3]  # also those before it is wanted again
    assert controls_of(instance, "a", "START", "END", "READY") == [[1, 0, True], [0, 0, True], [0, 0, True]]
    ids = [controls_of(instance, name, "ID") for name in "abc"]
    assert ids == [[[1]] * 3, [[2]], [[3]] * 2]
    assert client.target.num_pending == 0


async def test_iterative_requests_join_batches_between_executions() -> None:
    instance = Instance(rounds={"a": 3, "b": 1})
    client = Client(scheduler(instance, batching=ITERATIVE + "oldest { max_candidate_sequences: 3 }"))
    await client.send("a")
    await client.send("b")
    opened(instance)
    await client.wait()
    assert [sorted(batch) for batch in instance.batches] == [["a"], ["a", "b"], ["a", "b"], ["a"]]
    assert client.ended == ["b", "a"]


async def test_iterative_request_may_name_its_sequence_and_keeps_its_state() -> None:
    (instance,) = opened(Instance(answer=add_up, num_responses=2, rounds={"a": 1}))
    client = Conversation(scheduler(instance, batching=ITERATIVE, states=[sum_state(10)]))
    await client.send("a", sequence_id=1, sequence_start=True)
    await client.wait()
    assert [response.outputs[0].data.item() for response in client.responses["a"]] == [11, 12, 12]
    await client.send("b", sequence_id=1)  # with its one request a sequence is over
    assert isinstance(client.error("b"), InvalidArgument)
    await client.send("c", sequence_id=2, sequence_start=True)
    await client.send("d")  # its number is taken by nobody
    await client.wait()
    assert client.ended == ["a", "c", "d"]


async def test_cancelled_iterative_request_gives_its_slot_away() -> None:
    (instance,) = opened(Instance(rounds={"a": 10**9}))
    client = Client(scheduler(instance, batching=ITERATIVE, max_batch_size=1))
    await client.send("a", "b")
    assert len(instance.batches) > 1
    await client.cancel("a")
    await client.wait()
    assert instance.batches[-1] == ["b"]
    assert client.ended == ["b"]


async def test_iterative_requests_can_keep_the_order_of_answers() -> None:
    slow, quick = Instance("slow", rounds={"a": 1}), Instance("quick")
    batching = ITERATIVE + "oldest { max_candidate_sequences: 1 preserve_ordering: true }"
    client = Client(scheduler(slow, quick, batching=batching))
    await client.send("a", "b")
    opened(quick)
    await settle()
    assert client.ended == []
    opened(slow)
    await client.wait()
    assert sorted(client.ended) == ["a", "b"]


async def test_stop_ends_an_iterative_request_between_executions() -> None:
    instance = Instance(rounds={"a": 1})
    client = Client(scheduler(instance, batching=ITERATIVE))
    await client.send("a")
    await client.target.stop()
    opened(instance)
    await client.wait()
    assert isinstance(client.error("a"), Rejected)


async def test_only_iterative_requests_run_again() -> None:
    (instance,) = opened(Instance(rounds={"a": 1}))
    client = Client(scheduler(instance))
    await client.send("a", sequence_id=1, sequence_start=True)
    await client.wait()
    problem = "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured"
    assert isinstance(client.error("a"), InvalidArgument)
    assert problem in str(client.error("a"))
    await client.send("b", sequence_id=1)
    await client.wait()
    assert client.ended == ["b"]


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=8),
    st.sampled_from(["direct { }", "oldest { max_candidate_sequences: 2 }", "oldest { preserve_ordering: true }"]),
    st.integers(1, 3),
)
def test_every_iterative_request_runs_as_often_as_it_is_wanted(
    rounds: list[int], batching: str, max_batch_size: int
) -> None:
    async def play() -> None:
        names = [f"r{number}" for number in range(len(rounds))]
        wanted = dict(zip(names, rounds, strict=True))
        one, two = opened(Instance("one", rounds=wanted), Instance("two", rounds=wanted))
        times = {name: count + 1 for name, count in wanted.items()}
        client = Client(
            scheduler(one, two, batching=f"{ITERATIVE} {batching} {CONTROLS}", max_batch_size=max_batch_size)
        )
        await client.send(*names)
        await client.wait()
        assert sorted(client.ended) == names
        ran = [name for instance in (one, two) for batch in instance.batches for name in batch if name]
        assert {name: ran.count(name) for name in names} == times
        for name in names:
            starts = controls_of(one, name, "START") + controls_of(two, name, "START")
            assert sorted(starts, reverse=True) == [[1], *[[0]] * (times[name] - 1)]
        assert all(len(batch) <= max_batch_size for instance in (one, two) for batch in instance.batches)

    asyncio.run(play())
