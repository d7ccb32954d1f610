"""Ensembles of any shape: what runs at the same time, rounds of several decoupled steps, limits, unneeded steps.

Steps are scripted: no models, no repository.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.serving.ensemble import EnsembleScheduler
from llmserve.serving.ensemble_plan import EnsemblePlan, Step
from llmserve.serving.instruments.model_statistics import ModelStatistics, RequestTiming
from llmserve.serving.types import InferRequest, InferResponse, Tensor
from tests.serving.instances import settle
from tests.serving.models import floats, request, tensors


def step(name: str, inputs: str, outputs: str, *, decoupled: bool = False) -> Step:
    """Tensors have the same name in the step and in the ensemble."""
    return Step(name, "", tuple((t, t) for t in inputs.split()), tuple((t, t) for t in outputs.split()), (), decoupled)


@dataclass
class Script:
    """Unary steps answer with the sum of their inputs plus one; decoupled ones with `counts` numbers from 0."""

    counts: Mapping[str, int] = field(default_factory=dict)
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()
    started: list[str] = field(default_factory=list)
    requests: list[InferRequest] = field(default_factory=list)
    running: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    outputs: dict[str, list[str]] = field(default_factory=dict)
    runs_inline: bool = False

    def infer_inline(self, wanted: InferRequest, timing: RequestTiming) -> InferResponse | None:
        raise AssertionError("no step of these is brief")

    async def infer(self, wanted: InferRequest, timing: RequestTiming) -> AsyncGenerator[InferResponse, None]:
        name = wanted.model_name
        self.started.append(name)
        self.requests.append(wanted)
        self.running[name] += 1
        self.most[name] = max(self.most[name], self.running[name])
        try:
            if name in self.gates:
                await self.gates[name].wait()
            if name not in self.counts:
                await asyncio.sleep(0)
                total = sum(tensor.data for tensor in wanted.inputs.values()) + 1
                yield self._answer(wanted, total, final=True)
                return
            for number in range(self.counts[name]):
                yield self._answer(wanted, np.array([number], np.float32), final=False)
            yield InferResponse(name, "1", final=True)
        finally:
            self.running[name] -= 1

    def _answer(self, wanted: InferRequest, value: object, *, final: bool) -> InferResponse:
        made = self.outputs[wanted.model_name] if wanted.model_name not in self.silent else []
        data = np.asarray(value, np.float32)
        return InferResponse("", "", outputs=tuple(Tensor(name, "FP32", data) for name in made), final=final)


def ensemble(script: Script, *steps: Step, outputs: str, limit: int = 0) -> EnsembleScheduler:
    """Steps are given in the order of their tensors."""
    steps = tuple(replace(one, place=place) for place, one in enumerate(steps))
    script.outputs.update({one.model_name: [name for name, _ in one.outputs] for one in steps})
    declared = tensors("input", X="FP32 [ -1 ]") + tensors("output", **dict.fromkeys(outputs.split(), "FP32 [ -1 ]"))
    text = f'name: "ens" {declared} ensemble_scheduling {{ max_inflight_requests: {limit} }}'
    config = text_format.Parse(text, ModelConfig())
    models = {(one.model_name, one.model_version): script for one in steps}
    return EnsembleScheduler(config, "1", EnsemblePlan(steps), models=models, statistics=ModelStatistics("ens", "1"))


async def ask(target: EnsembleScheduler, **fields: object) -> list[InferResponse]:
    async with (
        asyncio.timeout(30),
        aclosing(target.infer(request("ens", floats(1), **fields), RequestTiming())) as stream,
    ):
        return [response async for response in stream]


def numbers(responses: list[InferResponse]) -> list[dict[str, float]]:
    return [{t.name: t.data.item() for t in response.outputs} for response in responses if response.outputs]


async def test_a_step_waits_for_its_own_inputs_only() -> None:
    script = Script(gates={"slow": asyncio.Event()})
    steps = (
        step("slow", "X", "a"),
        step("quick", "X", "b"),
        step("after_slow", "a", "c"),
        step("after_quick", "b", "d"),
    )
    target = ensemble(script, *steps, step("join", "c d", "Y"), outputs="Y")
    task = asyncio.create_task(ask(target))
    await settle()
    assert script.started == ["slow", "quick", "after_quick"]
    script.gates["slow"].set()
    assert numbers(await task) == [{"Y": 7}]


async def test_decoupled_branches_answer_in_rounds() -> None:
    script = Script(counts={"left": 3, "right": 5})
    steps = (
        step("left", "X", "l", decoupled=True),
        step("right", "X", "r", decoupled=True),
        step("join", "l r X", "Y"),
    )
    responses = await ask(ensemble(script, *steps, outputs="Y l"))
    assert numbers(responses) == [{"Y": 2 * i + 2, "l": i} for i in range(3)]
    assert [response.final for response in responses] == [False] * 3 + [True]
    assert +script.running == Counter()  # the longer one has been closed


async def test_two_steps_of_one_model_have_a_limit_each() -> None:
    script = Script(counts={"m": 2})
    steps = (step("m", "X", "l", decoupled=True), step("m", "X", "r", decoupled=True), step("join", "l r", "Y"))
    target = ensemble(script, *steps, outputs="Y", limit=1)
    script.outputs["m"] = ["l", "r"]
    assert len(numbers(await ask(target))) == 2


async def test_failure_of_one_branch_closes_the_other() -> None:
    script = Script(counts={"left": 3}, gates={"left": asyncio.Event()})
    steps = (step("left", "X", "l", decoupled=True), step("broken", "X", "r", decoupled=True), step("j", "l r", "Y"))
    script.counts = {"left": 3, "broken": 1}
    target = ensemble(script, *steps, outputs="Y")
    script.outputs.pop("broken")  # raises
    with pytest.raises(KeyError):
        await ask(target)
    assert +script.running == Counter()


async def test_what_is_not_wanted_does_not_run() -> None:
    script = Script(counts={"stream": 2})
    steps = (step("first", "X", "a"), step("stream", "a", "b", decoupled=True), step("other", "X", "c d"))
    target = ensemble(script, *steps, outputs="b c d")
    assert numbers(await ask(target, requested_outputs=("c",))) == [{"c": 2}]  # although the step makes both
    assert script.started == ["other"]
    assert script.requests[-1].requested_outputs == ("c",)
    script.started.clear()
    assert numbers(await ask(target, requested_outputs=("b",))) == [{"b": 0}, {"b": 1}]
    assert script.started == ["first", "stream"]


async def test_what_a_later_step_reads_is_needed_though_nobody_has_named_it() -> None:
    script = Script()
    steps = (step("first", "X", "a b"), step("last", "a", "c"))
    target = ensemble(script, *steps, outputs="b c")

    async def asked(**fields: object) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        script.requests.clear()
        await ask(target, **fields)
        return [(sent.requested_outputs, sent.needed_outputs) for sent in script.requests]

    assert await asked() == [((), ("a",)), ((), ())]
    assert await asked(needed_outputs=("b",)) == [((), ("a", "b")), ((), ())]  # in an ensemble around this one
    assert await asked(requested_outputs=("c",)) == [(("a",), ()), (("c",), ())]


async def test_output_that_was_asked_for_and_is_not_made() -> None:
    script = Script(silent=frozenset({"quiet"}))
    target = ensemble(script, step("quiet", "X", "Y"), step("loud", "X", "Z"), outputs="Y Z")
    assert numbers(await ask(target)) == [{"Z": 2}]
    (response,) = await ask(target, requested_outputs=("Y",))
    assert str(response.error) == (
        "in ensemble 'ens', unexpected deadlock, at least one output is not set while no more ensemble steps can be "
        "made"
    )


async def test_no_more_requests_are_in_a_step_than_the_limit() -> None:
    script = Script(counts={"stream": 5})
    steps = (step("stream", "X", "a", decoupled=True), step("post", "a", "Y"))
    target = ensemble(script, *steps, outputs="Y", limit=2)
    answers = await asyncio.gather(*(ask(target) for _ in range(10)))
    assert [len(numbers(answer)) for answer in answers] == [5] * 10
    assert script.most == Counter(stream=2, post=2)
    script.most.clear()
    await asyncio.gather(*(ask(ensemble(script, *steps, outputs="Y")) for _ in range(10)))
    assert script.most["stream"] == 10


async def test_cancelled_requests_leave_their_places() -> None:
    script = Script(gates={"one": asyncio.Event()})
    target = ensemble(script, step("one", "X", "Y"), outputs="Y", limit=1)
    tasks = [asyncio.create_task(ask(target)) for _ in range(3)]
    await settle()
    for task in tasks[:2]:  # one that runs and one that waits
        task.cancel()
    script.gates["one"].set()
    assert numbers(await tasks[2]) == [{"Y": 2}]


async def test_priority_timeout_and_sequence_are_passed_on() -> None:
    script = Script()
    target = ensemble(script, step("a", "X", "t"), step("b", "t", "Y"), outputs="Y")
    await ask(target, priority=2, timeout_us=5000, sequence_id=9, sequence_end=True, parameters={"k": "v"})
    for passed in script.requests:
        assert (passed.priority, passed.timeout_us, passed.sequence_id) == (2, 5000, 9)
        assert (passed.sequence_start, passed.sequence_end, passed.parameters) == (False, True, {"k": "v"})


@st.composite
def graphs(draw: st.DrawFn) -> list[Step]:
    """Unary steps and at most two decoupled ones, each reading from any that come before."""
    steps: list[Step] = []
    kinds = draw(st.permutations([False] * draw(st.integers(0, 5)) + [True] * draw(st.integers(0, 2))))
    for number, decoupled in enumerate(kinds):
        sources = draw(st.sets(st.sampled_from(["X", *(f"t{i}" for i in range(number))]), min_size=1))
        steps.append(step(f"s{number}", " ".join(sorted(sources)), f"t{number}", decoupled=decoupled))
    return steps or [step("s0", "X", "t0")]


@settings(max_examples=80)
@given(graphs(), st.integers(0, 3))
def test_every_graph_gives_what_its_tensors_say(steps: list[Step], limit: int) -> None:
    """Each unary tensor of each response is the sum of its inputs, of the same response, plus one."""

    async def play() -> None:
        counts = {one.model_name: 3 for one in steps if one.decoupled}
        script = Script(counts=counts)
        outputs = " ".join(tensor for one in steps for _, tensor in one.outputs)
        target = ensemble(script, *steps, outputs=outputs, limit=limit)
        answers = await asyncio.gather(ask(target), ask(target))
        for responses in answers:
            assert all(response.error is None for response in responses)
            assert [response.final for response in responses] == [False] * (len(responses) - 1) + [True]
            nested = any(_comes_from(one, other, steps) for one in steps for other in steps if other.decoupled)
            assert len(numbers(responses)) == (9 if nested else 3 if counts else 1)
            for made in numbers(responses):
                known = {"X": 1.0, **made}
                for one in steps:
                    if not one.decoupled:
                        assert known[one.outputs[0][0]] == 1 + sum(known[source] for _, source in one.inputs)
        assert +script.running == Counter()

    asyncio.run(play())


def _comes_from(one: Step, other: Step, steps: list[Step]) -> bool:
    """Whether a decoupled step reads, through others, from another decoupled one."""
    if not one.decoupled or one is other:
        return False
    reached = {tensor for _, tensor in other.outputs}
    for between in steps:
        if any(tensor in reached for _, tensor in between.inputs):
            if between is one:
                return True
            reached.update(tensor for _, tensor in between.outputs)
    return False
