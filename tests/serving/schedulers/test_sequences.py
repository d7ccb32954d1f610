"""Sequences: one slot and one order for all their requests, controls, state, idle time, and what ends them early."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.core import Tenant
from llmserve.errors import Cancelled, InternalError, InvalidArgument
from llmserve.serving.config.sequence_batching import fill_sequence_defaults, sequence_problems
from llmserve.serving.instruments.model_statistics import ModelStatistics
from llmserve.serving.schedulers.base import Rejected
from llmserve.serving.schedulers.controls import StateSpec
from llmserve.serving.schedulers.sequence_scheduler import SequenceScheduler
from llmserve.serving.signature import ModelSignature
from llmserve.serving.types import InferRequest, Tensor
from tests.serving.instances import Client, Instance, settle
from tests.serving.models import identity_config

CONTROLS = """
control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
control_input { name: "END" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [ 0, 1 ] } }
control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
"""


def parsed(batching: str, max_batch_size: int = 4) -> ModelConfig:
    text = identity_config(f"max_batch_size: {max_batch_size} sequence_batching {{ {batching} }}")
    config: ModelConfig = text_format.Parse('name: "m"\n' + text, ModelConfig())
    fill_sequence_defaults(config)
    return config


def scheduler(
    *instances: Instance, batching: str = "direct { }", max_batch_size: int = 4, states: Any = ()
) -> SequenceScheduler:
    config = parsed(batching, max_batch_size)
    statistics = ModelStatistics("m", "1")
    return SequenceScheduler(config, ModelSignature(config), instances, statistics=statistics, states=states)


def opened(*instances: Instance) -> tuple[Instance, ...]:
    for instance in instances:
        instance.gate.set()
    return instances


class Conversation(Client):
    """Names requests after their sequence: `a1` and `a2` belong to sequence "a"; START and END by their marks."""

    async def say(self, *names: str, width: int = 1) -> None:
        """`>a1` starts, `a2<` ends."""
        for marked in names:
            name = marked.strip("<>")
            flags = {"sequence_start": marked.startswith(">"), "sequence_end": marked.endswith("<")}
            await self.send(name, width=width, sequence_id=ord(name[0]), **flags)


def scalars(request: InferRequest, *names: str) -> list[Any]:
    return [request.inputs[name].data.item() for name in names]


async def test_requests_of_a_sequence_run_one_after_the_other_on_one_instance() -> None:
    one, two = Instance("one"), Instance("two")
    client = Conversation(scheduler(one, two, batching="oldest { max_candidate_sequences: 1 }"))
    await client.say(">a1", ">b1", "a2", "b2<", "a3<")
    assert (one.batches, two.batches) == ([["a1"]], [["b1"]])
    assert client.target.num_pending == 3
    opened(one, two)
    await client.wait()
    assert (one.batches, two.batches) == ([["a1"], ["a2"], ["a3"]], [["b1"], ["b2"]])


async def test_an_id_names_nothing_of_another_tenant() -> None:
    (instance,) = opened(Instance())
    client = Client(scheduler(instance, batching=f"direct {{ }} {CONTROLS}"))
    one, two = Tenant("one"), Tenant("two")
    await client.send("a1", sequence_id=7, sequence_start=True, tenant=one)
    await client.send("b1", sequence_id=7, tenant=two)
    assert "must specify the START flag" in str(client.error("b1"))
    await client.send("b2", sequence_id=7, sequence_start=True, tenant=two)
    await client.send("b3", sequence_id=7, sequence_end=True, tenant=two)
    await client.send(
        "a2", sequence_id=7, sequence_end=True, tenant=replace(one, weight=2.0)
    )  # the keys were read again
    assert instance.batches == [["a1"], ["", "b2"], ["", "b3"], ["a2"]]
    assert [requests[-1].inputs["ID"].data.item() for requests in instance.requests] == [7] * 4


async def test_sequence_without_a_slot_waits_until_one_has_ended() -> None:
    instance = Instance()
    client = Conversation(scheduler(instance, max_batch_size=1))
    await client.say(">a1", ">b1", "b2<", ">c1<", "a2")
    opened(instance)
    await settle()
    assert instance.batches == [["a1"], ["a2"]]
    await client.say("a3<")
    await client.wait()
    assert instance.batches == [["a1"], ["a2"], ["a3"], ["b1"], ["b2"], ["c1"]]


async def test_direct_gives_a_sequence_its_place_in_the_batch_and_fills_the_holes() -> None:
    (instance,) = opened(Instance())
    client = Conversation(scheduler(instance, batching=f"direct {{ }} {CONTROLS}"))
    await client.say(">a1", ">b1", ">c1")
    await client.say("b2")
    assert instance.batches[-1] == ["", "b2", ""]
    controls = [scalars(request, "READY", "START", "END") for request in instance.requests[-1]]
    assert controls == [[False, 0, 0], [True, 0, 0], [False, 0, 0]]
    await client.say("b3<")
    assert scalars(instance.requests[-1][1], "READY", "START", "END") == [True, 0, 1]
    assert instance.requests[-1][1].inputs["END"].shape == (1, 1)
    await client.say(">d1<")  # in the place of b
    assert instance.batches[-1] == ["", "d1", ""]
    assert scalars(instance.requests[-1][1], "READY", "START", "END") == [True, 1, 1]
    await client.wait()


async def test_direct_waits_for_slots_when_it_is_told_to() -> None:
    (instance,) = opened(Instance())
    direct = "direct { max_queue_delay_microseconds: 40000 minimum_slot_utilization: 0.5 }"
    client = Conversation(scheduler(instance, batching=direct))
    await client.say(">a1")
    assert instance.batches == []
    await client.say(">b1")  # half of the four slots
    assert instance.batches == [["a1", "b1"]]
    await client.say("a2")
    assert len(instance.batches) == 1
    await client.wait()
    assert instance.batches[1] == ["a2", ""]
    assert client.timings["a2"].queue_ns > 30e6


async def test_direct_does_not_mix_shapes() -> None:
    instance = Instance()
    client = Conversation(scheduler(instance))
    await client.say(">x1")
    await client.say(">a1", width=2)
    await client.say(">b1", ">c1")
    opened(instance)
    await client.wait()
    assert instance.batches == [["x1"], ["", "a1", "", ""], ["", "", "b1", "c1"]]
    nothing = instance.requests[1][0].inputs["X"]
    assert nothing.shape == (1, 2)


async def test_oldest_batches_one_request_of_each_candidate() -> None:
    instance = Instance()
    batching = "oldest { max_candidate_sequences: 3 preferred_batch_size: 2 max_queue_delay_microseconds: 1000000 }"
    client = Conversation(scheduler(instance, batching=batching))
    await client.say(">a1", "a2")
    assert instance.batches == []  # waits for a second sequence
    await client.say(">b1", ">c1", ">d1")
    assert instance.batches == [["a1", "b1"]]
    assert client.target.num_pending == 3
    opened(instance)
    await settle()
    assert instance.batches == [["a1", "b1"], ["a2", "c1"]]


async def test_oldest_can_keep_the_order_of_answers() -> None:
    slow, quick = Instance("slow"), Instance("quick")
    batching = "oldest { max_candidate_sequences: 1 preserve_ordering: true }"
    client = Conversation(scheduler(slow, quick, batching=batching))
    await client.say(">a1", ">b1")
    opened(quick)
    await settle()
    assert client.ended == []
    opened(slow)
    await client.wait()
    assert client.ended == ["a1", "b1"]


async def test_correlation_ids_reach_the_model() -> None:
    (instance,) = opened(Instance())
    client = Client(scheduler(instance, batching=CONTROLS))
    await client.send("r", sequence_id=2**63, sequence_start=True)
    assert scalars(instance.requests[0][0], "ID") == [2**63]
    for wrong in (-1, 2**64):
        await client.send("w", sequence_id=wrong, sequence_start=True)
        assert isinstance(client.error("w"), InvalidArgument)
    assert f"correlation ID {2**64}, which input 'ID' of type UINT64 cannot hold" in str(client.error("w"))


async def test_a_text_is_told_as_a_number_of_its_own_to_a_model_that_wants_numbers() -> None:
    (instance,) = opened(Instance())
    client = Client(scheduler(instance, batching=CONTROLS.replace("TYPE_UINT64", "TYPE_INT32")))
    names = [f"sequence-{number}" for number in range(3)]
    for number, name in enumerate((*names, names[0])):
        await client.send(f"r{number}", sequence_id=name, sequence_start=True, sequence_end=True)
        instance.gate.set()
        await client.wait()
    told = [scalars(batch[0], "ID")[0] for batch in instance.requests]
    assert told[0] == told[3]
    assert len({0, *told}) == 4


async def test_ids_as_texts() -> None:
    (instance,) = opened(Instance())
    controls = CONTROLS.replace("TYPE_UINT64", "TYPE_STRING")
    client = Client(scheduler(instance, batching=controls))
    await client.send("r", sequence_id="abc", sequence_start=True)
    await client.send("n", sequence_id=7, sequence_start=True)
    assert [scalars(requests[-1], "ID") for requests in instance.requests] == [[b"abc"], [b"7"]]
    await client.send("l", sequence_id="x" * 129, sequence_start=True)
    assert isinstance(client.error("l"), InvalidArgument)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "inference request to model 'm' must specify a non-zero or non-empty correlation ID"),
        (
            {"sequence_id": 901},
            "inference request for sequence 901 to model 'm' must specify the START flag on the first request of the "
            "sequence",
        ),
    ],
)
async def test_requests_outside_of_a_sequence(fields: dict[str, Any], problem: str) -> None:
    client = Client(scheduler(Instance()))
    await client.send("r", **fields)
    assert isinstance(client.error("r"), InvalidArgument)
    assert str(client.error("r")) == problem


async def test_after_its_end_a_sequence_is_unknown_and_its_id_free() -> None:
    (instance,) = opened(Instance())
    client = Conversation(scheduler(instance))
    await client.say(">a1", "a2<", "a3")
    assert isinstance(client.error("a3"), InvalidArgument)
    await client.say(">a4")
    await client.wait()
    assert client.ended == ["a1", "a2", "a4"]


async def test_idle_sequence_loses_its_slot() -> None:
    (instance,) = opened(Instance())
    client = Conversation(scheduler(instance, batching="max_sequence_idle_microseconds: 150000", max_batch_size=1))
    await client.say(">a1", ">b1")
    assert instance.batches == [["a1"]]
    await asyncio.sleep(0.05)
    await client.say("a2")  # not idle
    start = asyncio.get_running_loop().time()
    await client.wait()
    assert asyncio.get_running_loop().time() - start > 0.14
    assert instance.batches == [["a1"], ["a2"], ["b1"]]
    await client.say("a3")
    assert isinstance(client.error("a3"), InvalidArgument)


async def test_sequence_is_not_idle_while_it_runs() -> None:
    instance = Instance()
    client = Conversation(scheduler(instance, batching="max_sequence_idle_microseconds: 50000"))
    await client.say(">a1")
    await asyncio.sleep(0.1)
    opened(instance)
    await client.say("a2")
    await client.wait()
    assert client.ended == ["a1", "a2"]


def add_up(request: InferRequest) -> tuple[Tensor, ...]:
    total = request.inputs["SUM_IN"].data + 1
    return (Tensor("Y", "FP32", total), Tensor("SUM_OUT", "FP32", total))


def sum_state(initial: float = 0) -> StateSpec:
    start = Tensor("SUM_IN", "FP32", np.full((1, 1), initial, np.float32))
    return StateSpec("SUM_IN", "SUM_OUT", (1, -1), start)


def sums(client: Client) -> list[float]:
    return [client.responses[name][-1].outputs[0].data.item() for name in client.ended]


async def test_state_goes_from_request_to_request_and_begins_anew() -> None:
    (instance,) = opened(Instance(answer=add_up))
    client = Conversation(scheduler(instance, states=[sum_state(10)]))
    await client.say(">a1", "a2", ">b1", "a3")
    await client.say(">a4", "a5<")  # a second START
    assert client.ended == ["a1", "a2", "b1", "a3", "a4", "a5"]
    assert sums(client) == [11, 12, 11, 13, 11, 12]


async def test_state_that_is_none_fails_its_request_alone() -> None:
    def wrong(request: InferRequest) -> tuple[Tensor, ...]:
        if request.request_id == "a2":
            return (Tensor("SUM_OUT", "INT32", np.zeros((1, 1), np.int32)),)
        return add_up(request)

    (instance,) = opened(Instance(answer=wrong))
    client = Conversation(scheduler(instance, states=[sum_state()]))
    await client.say(">a1", "a2", "a3")
    await client.wait()
    assert isinstance(client.error("a2"), InternalError)
    assert "returned state 'SUM_OUT' as INT32 of shape [1,1], but its config says FP32 [1,-1]" in str(
        client.error("a2")
    )
    assert sums(client) == [1, 2]


@pytest.mark.parametrize("victim", ["a1", "a2"])
async def test_cancelled_request_ends_its_sequence(victim: str) -> None:
    instance = Instance()
    client = Conversation(scheduler(instance, max_batch_size=1))
    await client.say(">a1", "a2", "a3", ">b1<")
    await client.cancel(victim)
    assert isinstance(client.error("a3"), Cancelled)
    await client.say("a4")
    assert isinstance(client.error("a4"), InvalidArgument)
    opened(instance)
    await client.wait()
    assert client.ended == (["b1"] if victim == "a1" else ["a1", "b1"])


async def test_instance_that_fails_harms_its_own_requests_and_not_the_sequence() -> None:
    class Fails(Instance):
        def execute(self, requests: Any) -> Any:
            if requests[0].request_id == "a2":
                raise RuntimeError("boom")
            return super().execute(requests)

    (instance,) = opened(Fails())
    client = Conversation(scheduler(instance, max_batch_size=1))
    await client.say(">a1", "a2", "a3<", ">b1<")
    await client.wait()
    assert str(client.error("a2")) == "boom"
    assert client.ended == ["a1", "a3", "b1"]


async def test_new_sequences_avoid_an_instance_that_has_died() -> None:
    dead, alive = opened(Instance("dead"), Instance("alive"))
    client = Conversation(scheduler(dead, alive, max_batch_size=1))
    dead.works = False
    await client.say(">a1<", ">b1<")
    await client.wait()
    assert (dead.batches, alive.batches) == ([], [["a1"], ["b1"]])


async def test_stop_refuses_what_waits() -> None:
    instance = Instance()
    client = Conversation(scheduler(instance, max_batch_size=1))
    await client.say(">a1", "a2", ">b1")
    await client.target.stop()
    await client.say("a3", ">c1")
    opened(instance)
    await client.wait()
    assert client.ended == ["a1"]
    assert all(isinstance(client.error(name), Rejected) for name in ("a2", "b1", "a3", "c1"))
    assert client.target.num_pending == 0


scripts = st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from(["say", "end", "cancel", "go"])), max_size=30)


@settings(max_examples=60)
@given(scripts, st.sampled_from(["direct { }", "oldest { max_candidate_sequences: 2 }"]), st.integers(1, 3))
def test_one_place_and_one_order_for_every_sequence(
    script: list[tuple[str, str]], batching: str, max_batch_size: int
) -> None:
    async def play() -> None:
        instances = (Instance("one"), Instance("two"))
        client = Conversation(scheduler(*instances, batching=batching, max_batch_size=max_batch_size))
        sent: dict[str, list[str]] = {}
        lives = dict.fromkeys("abcde", 0)
        for number, (who, what) in enumerate(script):
            name = f"{who}{number}"
            living = sent.setdefault(f"{who}/{lives[who]}", [])
            if what == "go":
                opened(*instances)
                await settle()
                for instance in instances:
                    instance.gate.clear()
            elif what == "cancel":
                waiting = [sent_name for sent_name in living if not client.tasks[sent_name].done()]
                if waiting:
                    await client.cancel(waiting[-1])
                    lives[who] += 1
            else:
                mark = "" if living else ">"
                await client.say(f"{mark}{name}{'<' if what == 'end' else ''}")
                living.append(name)
                lives[who] += what == "end"
        opened(*instances)
        await client.wait()
        check(instances, sent, max_batch_size)
        ended = [name for name, task in client.tasks.items() if not task.cancelled() and task.exception() is None]
        assert sorted(ended) == sorted(client.ended)
        lost = [name for name, task in client.tasks.items() if not task.done()]
        assert lost == []

    asyncio.run(play())


def check(instances: tuple[Instance, ...], sent: dict[str, list[str]], max_batch_size: int) -> None:
    """Every sequence ran on one instance, in order, at most one request of it at a time."""
    for names in sent.values():
        ran = [(i, b, name) for i, one in enumerate(instances) for b, batch in enumerate(one.batches) for name in batch]
        own = [(instance, batch, name) for instance, batch, name in ran if name in names]
        assert len({instance for instance, _, _ in own}) <= 1
        assert [name for _, _, name in own] == [name for name in names if name in {n for _, _, n in own}]
        assert len({batch for _, batch, _ in own}) == len(own)
    assert all(len(batch) <= max_batch_size for one in instances for batch in one.batches)


@pytest.mark.parametrize(
    ("batching", "problem"),
    [
        ("control_input { control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }", "has no name"),
        ('control_input { name: "S" }', "control_input 'S' must have one control, got 0"),
        ('control_input { name: "S" control { kind: CONTROL_SEQUENCE_START } }', "give one of int32_false_true"),
        (
            'control_input { name: "S" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [ 1 ] } }',
            "fp32_false_true must have exactly 2 entries, got 1",
        ),
        (
            'control_input { name: "S" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32 } }',
            "data_type of CONTROL_SEQUENCE_CORRID must be one of TYPE_UINT64",
        ),
        (
            CONTROLS
            + 'control_input { name: "S" control { kind: CONTROL_SEQUENCE_END bool_false_true: [false, true] } }',
            "sequence batching specifies multiple CONTROL_SEQUENCE_END tensors",
        ),
        (CONTROLS.replace('"ID"', '"X"'), "input 'X' is declared 2 times"),
        ("direct { minimum_slot_utilization: 2 }", "minimum_slot_utilization must be in 0 .. 1, got 2"),
        ("oldest { preferred_batch_size: 9 }", "preferred_batch_size 9 is not in 1 .. max_batch_size (4)"),
        ("oldest { max_candidate_sequences: -1 }", "max_candidate_sequences must not be negative"),
        ('state { input_name: "S" data_type: TYPE_FP32 dims: [ 1 ] }', "needs an input_name and an output_name"),
        ('state { input_name: "S" output_name: "T" dims: [ 0 ] }', "state 'S' has no data_type"),
        (
            'state { input_name: "S" output_name: "T" data_type: TYPE_FP32 dims: [ -1, 2 ] '
            "initial_state { dims: [ 3, 3 ] zero_data: true } }",
            "dims of initial_state are [3, 3], of the state [-1, 2]",
        ),
        (
            'state { input_name: "S" output_name: "T" data_type: TYPE_FP32 dims: [ 1 ] initial_state { dims: [ 1 ] } }',
            "initial_state has neither zero_data nor data_file",
        ),
    ],
)
def test_declaration_that_is_wrong(batching: str, problem: str) -> None:
    assert [found for found in sequence_problems(parsed(batching)) if problem in found]


def test_declaration_that_is_right() -> None:
    state = (
        'state { input_name: "S" output_name: "T" data_type: TYPE_FP32 dims: [ -1 ] '
        "use_same_buffer_for_input_output: true initial_state { data_type: TYPE_FP32 dims: [ 2 ] zero_data: true } }"
    )
    config = parsed(CONTROLS + state)
    assert sequence_problems(config) == []
    assert config.sequence_batching.max_sequence_idle_microseconds == 1_000_000
