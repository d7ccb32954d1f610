"""Ensembles: composition, order, cancellation, final flags, and what is refused at load."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from llmserve.backends.identity import IdentityBackend
from llmserve.errors import InternalError, InvalidArgument
from llmserve.serving.backend import LoadContext, LoadedModel
from llmserve.serving.core import InferenceCore
from llmserve.serving.settings import ServerSettings
from llmserve.serving.types import Tensor
from tests.serving.models import (
    appears,
    collect,
    floats,
    identity_config,
    request,
    serving,
    single,
    tensors,
    values,
    write_model,
)

ADD_ONE = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy() + 1)]) for r in requests]
"""
SUM = """
class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        total = sum(tensor.as_numpy() for tensor in request.inputs())
        return [pb_utils.InferenceResponse([pb_utils.Tensor("S", total)])]
"""
COUNT = """
import pathlib, time
class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        sender, x = request.get_response_sender(), request.inputs()[0].as_numpy()
        n = int(x[0])
        for i in range(n):
            if request.is_cancelled():
                pathlib.Path(__file__).with_name("cancelled").write_text(str(i))
                break
            last = i == n - 1 and x.size > 1  # a second element asks for the final flag with the last response
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x[:1] * 0 + i)]), flags=1 if last else 0)
            if n > 100:
                time.sleep(0.002)
        if n == 0 or x.size == 1:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SLEEPY = """
import random, time
class TritonPythonModel:
    def execute(self, requests):
        time.sleep(random.random() * 0.004)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy() * 10)]) for r in requests]
"""
PYTHON = identity_config().replace("identity", "python")
DECOUPLED = PYTHON + "model_transaction_policy { decoupled: true }\n"


def step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    """Mappings are tensor of the model -> tensor of the ensemble."""
    maps = [f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items()]
    maps += [f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items()]
    return f'step {{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}'


def ensemble(*steps: str, extra: str = "", inputs: str = "", outputs: str = "") -> str:
    declared = (inputs or tensors("input", X="FP32 [ -1 ]")) + (outputs or tensors("output", Y="FP32 [ -1 ]"))
    return f'platform: "ensemble"\n{declared}\n{extra}\nensemble_scheduling {{ {" ".join(steps)} }}'


def failure(core: InferenceCore, name: str = "ens") -> str:
    (row,) = [row for row in core.repository_index() if row.name == name]
    assert row.state == "UNAVAILABLE"
    return row.reason


async def test_linear_steps_written_in_any_order(tmp_path: Path) -> None:
    write_model(tmp_path, "inc", PYTHON, ADD_ONE)
    write_model(tmp_path, "ens", ensemble(step("inc", {"X": "t"}, {"Y": "Y"}), step("inc", {"X": "X"}, {"Y": "t"})))
    async with serving(tmp_path) as core:
        response = await single(core, request("ens", floats(1), request_id="r1"))
        assert values(response) == [3]
        assert (response.model_name, response.model_version, response.request_id) == ("ens", "1", "r1")
        assert not core.model_config("ens").model_transaction_policy.decoupled
        assert core.model_metadata("ens").platform == "ensemble"


async def test_branches_run_at_the_same_time_and_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    branches = ModuleType("branches")
    branches.run = threading.Barrier(2)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "branches", branches)
    together = "import branches\n" + ADD_ONE.replace("return", "branches.run.wait(30); return")
    write_model(tmp_path, "left", PYTHON, together)
    write_model(tmp_path, "right", PYTHON, together)
    joined = f'backend: "python"\n{tensors("input", A="FP32 [ -1 ]", B="FP32 [ -1 ]", C="FP32 [ -1 ]")}'
    write_model(tmp_path, "sum", joined + tensors("output", S="FP32 [ -1 ]"), SUM)
    steps = (
        step("sum", {"A": "l", "B": "r", "C": "X"}, {"S": "Y"}),
        step("left", {"X": "X"}, {"Y": "l"}),
        step("right", {"X": "X"}, {"Y": "r"}),
    )
    write_model(tmp_path, "ens", ensemble(*steps))
    async with serving(tmp_path) as core:
        assert values(await single(core, request("ens", floats(2)))) == [3 + 3 + 2]


async def test_outputs_are_alphabetical_and_can_be_chosen(tmp_path: Path) -> None:
    write_model(tmp_path, "inc", PYTHON, ADD_ONE)
    config = ensemble(
        step("inc", {"X": "X"}, {"Y": "b"}),
        step("inc", {"X": "b"}, {"Y": "a"}),
        outputs=tensors("output", b="FP32 [ -1 ]", a="FP32 [ -1 ]"),
    )
    write_model(tmp_path, "ens", config)
    async with serving(tmp_path) as core:
        response = await single(core, request("ens", floats(0)))
        assert [tensor.name for tensor in response.outputs] == ["a", "b"]
        response = await single(core, request("ens", floats(0), requested_outputs=("b",)))
        assert [tensor.name for tensor in response.outputs] == ["b"]
        with pytest.raises(InvalidArgument, match="unexpected inference output 'c' for model 'ens'"):
            await single(core, request("ens", floats(0), requested_outputs=("c",)))


async def test_order_is_kept_over_several_instances_with_random_delays(tmp_path: Path) -> None:
    write_model(tmp_path, "count", DECOUPLED, COUNT)
    write_model(tmp_path, "post", PYTHON + "instance_group { count: 2 }", SLEEPY)
    write_model(tmp_path, "ens", ensemble(step("count", {"X": "X"}, {"Y": "t"}), step("post", {"X": "t"}, {"Y": "Y"})))
    async with serving(tmp_path) as core:
        assert core.model_config("ens").model_transaction_policy.decoupled
        answers = await asyncio.gather(*(collect(core, request("ens", floats(20))) for _ in range(6)))
    for responses in answers:
        assert [values(response) for response in responses[:-1]] == [[i * 10] for i in range(20)]
        assert [response.final for response in responses] == [False] * 20 + [True]
        assert responses[-1].outputs == ()


async def test_final_flag_with_the_last_response_goes_through(tmp_path: Path) -> None:
    write_model(tmp_path, "count", DECOUPLED, COUNT)
    write_model(tmp_path, "inc", PYTHON, ADD_ONE)
    write_model(tmp_path, "ens", ensemble(step("count", {"X": "X"}, {"Y": "t"}), step("inc", {"X": "t"}, {"Y": "Y"})))
    async with serving(tmp_path) as core:
        responses = await collect(core, request("ens", floats(2, 1)))
        assert [(values(response), response.final) for response in responses] == [([1], False), ([2], True)]
        (nothing,) = await collect(core, request("ens", floats(0)))
        assert (nothing.outputs, nothing.final, nothing.error) == ((), True, None)


async def test_decoupled_step_feeding_another(tmp_path: Path) -> None:
    write_model(tmp_path, "count", DECOUPLED, COUNT)
    write_model(tmp_path, "ens", ensemble(step("count", {"X": "X"}, {"Y": "t"}), step("count", {"X": "t"}, {"Y": "Y"})))
    async with serving(tmp_path) as core:
        responses = await collect(core, request("ens", floats(4)))
    assert [values(response)[0] for response in responses if response.outputs] == [0, 0, 1, 0, 1, 2]
    assert [response.final for response in responses] == [False] * 6 + [True]


async def test_closing_the_stream_reaches_the_running_step(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "count", DECOUPLED, COUNT)
    write_model(tmp_path, "inc", PYTHON, ADD_ONE)
    write_model(tmp_path, "ens", ensemble(step("count", {"X": "X"}, {"Y": "t"}), step("inc", {"X": "t"}, {"Y": "Y"})))
    async with serving(tmp_path) as core:
        async with aclosing(core.infer_stream(request("ens", floats(100000)))) as stream:
            await anext(stream)
            await anext(stream)
        assert await appears(directory / "1" / "cancelled")
        text = core.metrics_text()
    for model in ("ens", "count"):
        assert f'nv_inference_request_failure{{model="{model}",reason="CANCELED",version="1"}} 1' in text


async def test_cancelling_the_task_reaches_a_unary_step(tmp_path: Path) -> None:
    write_model(
        tmp_path, "slow", identity_config('parameters { key: "execute_delay_ms" value { string_value: "9999" } }')
    )
    write_model(tmp_path, "ens", ensemble(step("slow", {"X": "X"}, {"Y": "Y"})))
    async with serving(tmp_path) as core:
        task = asyncio.create_task(single(core, request("ens", floats(1))))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert core.statistics("slow")[0].inference_stats.fail.count == 1


async def test_failure_of_a_step_ends_the_request_with_the_ensembles_name(tmp_path: Path) -> None:
    code = ADD_ONE.replace("return", "raise ValueError('boom')\n        return")
    write_model(tmp_path, "bad", PYTHON, code)
    write_model(tmp_path, "ens", ensemble(step("bad", {"X": "X"}, {"Y": "Y"})))
    async with serving(tmp_path) as core:
        (response,) = await collect(core, request("ens", floats(1)))
        text = core.metrics_text()
    assert isinstance(response.error, InternalError)
    assert response.final
    assert response.model_name == "ens"
    assert str(response.error).startswith(
        "in ensemble 'ens', Failed to process the request(s) for model 'bad_0', message: ValueError: boom"
    )
    assert 'nv_inference_request_failure{model="ens",reason="OTHER",version="1"} 1' in text
    assert 'nv_inference_request_failure{model="bad",reason="BACKEND",version="1"} 1' in text


async def test_failure_in_one_branch_cancels_the_other(tmp_path: Path) -> None:
    write_model(tmp_path, "bad", PYTHON, ADD_ONE.replace("return", "raise ValueError('boom')\n        return"))
    write_model(
        tmp_path, "slow", identity_config('parameters { key: "execute_delay_ms" value { string_value: "9999" } }')
    )
    config = ensemble(
        step("bad", {"X": "X"}, {"Y": "Y"}),
        step("slow", {"X": "X"}, {"Y": "Z"}),
        outputs=tensors("output", Y="FP32 [ -1 ]", Z="FP32 [ -1 ]"),
    )
    write_model(tmp_path, "ens", config)
    async with serving(tmp_path) as core, asyncio.timeout(30):
        (response,) = await collect(core, request("ens", floats(1)))
    assert "boom" in str(response.error)


async def test_tensors_that_a_step_refuses(tmp_path: Path) -> None:
    write_model(tmp_path, "pair", identity_config(dims="[ 2 ]"))
    write_model(tmp_path, "ens", ensemble(step("pair", {"X": "X"}, {"Y": "Y"})))
    async with serving(tmp_path) as core:
        (response,) = await collect(core, request("ens", floats(1, 2, 3), request_id="r1"))
    assert isinstance(response.error, InvalidArgument)
    assert str(response.error).startswith(
        "in ensemble 'ens', [request id: r1] unexpected shape for input 'X' for model 'pair'. Expected [2], got [3]."
    )


async def test_absent_optional_inputs_stay_absent(tmp_path: Path) -> None:
    optional = 'backend: "python"\n' + tensors("input", A="FP32 [ -1 ]", B="FP32 [ -1 ] optional: true")
    write_model(tmp_path, "sum", optional + tensors("output", S="FP32 [ -1 ]"), SUM)
    config = ensemble(
        step("sum", {"A": "X", "B": "extra"}, {"S": "Y"}),
        inputs=tensors("input", X="FP32 [ -1 ]", extra="FP32 [ -1 ] optional: true"),
    )
    write_model(tmp_path, "ens", config)
    async with serving(tmp_path) as core:
        assert values(await single(core, request("ens", floats(1)))) == [1]
        assert values(await single(core, request("ens", floats(1), floats(5, name="extra")))) == [6]


async def test_batches_and_parameters_go_through(tmp_path: Path) -> None:
    code = """
import json
class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        assert request.request_id() == "r1"
        scale = json.loads(request.parameters())["scale"]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", request.inputs()[0].as_numpy() * scale)])]
"""
    write_model(tmp_path, "scale", PYTHON + "max_batch_size: 4", code)
    write_model(tmp_path, "ens", ensemble(step("scale", {"X": "X"}, {"Y": "Y"}), extra="max_batch_size: 4"))
    async with serving(tmp_path) as core:
        given = Tensor("X", "FP32", np.array([[1], [2]], np.float32))
        response = await single(core, request("ens", given, request_id="r1", parameters={"scale": 3}))
        assert values(response) == [[3], [6]]
        assert core.statistics("ens")[0].inference_count == 2


async def test_ensemble_inside_an_ensemble(tmp_path: Path) -> None:
    write_model(tmp_path, "inc", PYTHON, ADD_ONE)
    write_model(
        tmp_path, "a_outer", ensemble(step("inner", {"X": "X"}, {"Y": "t"}), step("inc", {"X": "t"}, {"Y": "Y"}))
    )
    write_model(tmp_path, "inner", ensemble(step("inc", {"X": "X"}, {"Y": "Y"})))
    async with serving(tmp_path) as core:
        assert values(await single(core, request("a_outer", floats(1)))) == [3]


async def test_statistics_of_an_ensemble_are_the_sum_of_its_steps(tmp_path: Path) -> None:
    write_model(
        tmp_path, "slow", identity_config('parameters { key: "execute_delay_ms" value { string_value: "20" } }')
    )
    write_model(tmp_path, "ens", ensemble(step("slow", {"X": "X"}, {"Y": "t"}), step("slow", {"X": "t"}, {"Y": "Y"})))
    async with serving(tmp_path) as core:
        await single(core, request("ens", floats(1)))
        (whole,), (steps,) = core.statistics("ens"), core.statistics("slow")
    assert whole.execution_count == 1
    assert steps.execution_count == 2
    assert whole.inference_stats.compute_infer.ns == steps.inference_stats.compute_infer.ns
    assert whole.inference_stats.success.ns > whole.inference_stats.compute_infer.ns > 40e6
    assert [batch.batch_size for batch in whole.batch_stats] == [1]


@pytest.mark.parametrize(
    ("config", "problems"),
    [
        (
            ensemble(),
            ["it has no steps", "output 'Y' is not produced by any step", "input 'X' is not used by any step"],
        ),
        (
            ensemble(step("nope", {"X": "X"}, {"Y": "Y"})),
            ["step 'nope': Request for unknown model: 'nope' is not found"],
        ),
        (
            ensemble(
                step("m", {"X": "a"}, {"Y": "b"}), step("m", {"X": "b"}, {"Y": "a"}), step("m", {"X": "X"}, {"Y": "Y"})
            ),
            ["steps 'm', 'm' wait for each other's outputs: they form a cycle"],
        ),
        (
            ensemble(step("m", {"X": "ghost"}, {"Y": "Y"})),
            ["tensor 'ghost' is read by a step but nothing produces it", "input 'X' is not used by any step"],
        ),
        (
            ensemble(step("m", {"Q": "X"}, {"R": "Y"})),
            [
                "step 'm': input_map names 'Q', which is not an input of the model",
                "step 'm': output_map names 'R', which is not an output of the model",
                "step 'm': input 'X' of the model is not mapped",
            ],
        ),
        (
            ensemble(step("m", {"X": "X"}, {"Y": "Y"}), step("m", {"X": "X"}, {"Y": "Y"})),
            ["tensor 'Y' has two producers: step 'm' and step 'm'"],
        ),
        (
            ensemble(step("ints", {"X": "X"}, {"Y": "Y"})),
            [
                "tensor 'X' is FP32, but step 'ints' has it as INT32",
                "tensor 'Y' is FP32, but step 'ints' has it as INT32",
            ],
        ),
        (
            ensemble(step("wide", {"X": "X"}, {"Y": "t"}), step("m", {"X": "t"}, {"Y": "Y"})),
            ["tensor 'X' has shape [-1], but step 'wide' has it as [2,3]", "tensor 't' has shape [2,3], but step 'm'"],
        ),
        (
            ensemble(step("batched", {"X": "X"}, {"Y": "Y"}), extra="max_batch_size: 8"),
            ["max_batch_size is 8, but step 'batched' allows at most 4"],
        ),
    ],
)
async def test_what_does_not_fit_is_refused_at_load(tmp_path: Path, config: str, problems: list[str]) -> None:
    write_model(tmp_path, "m", identity_config())
    write_model(tmp_path, "wide", identity_config(dims="[ 2, 3 ]"))
    write_model(tmp_path, "ints", identity_config().replace("FP32", "INT32"))
    write_model(tmp_path, "batched", identity_config("max_batch_size: 4"))
    write_model(tmp_path, "ens", config)
    async with serving(tmp_path) as core:
        reason = failure(core)
        assert [problem for problem in problems if problem not in reason] == []
        assert core.model_ready("m")


class Incomplete(IdentityBackend):
    """Never makes an output Y."""

    def load(self, context: LoadContext) -> LoadedModel:
        return replace(super().load(context), missing_outputs={"Y"})


async def test_a_step_that_requires_what_is_never_made_is_refused_at_load(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config())
    write_model(tmp_path, "easy", identity_config().replace('name: "X"', 'name: "X" optional: true'))
    steps = step("m", {"X": "X"}, {"Y": "t"})
    write_model(tmp_path, "ens", ensemble(steps, step("m", {"X": "t"}, {"Y": "Y"})))
    write_model(tmp_path, "fine", ensemble(steps, step("easy", {"X": "t"}, {"Y": "Y"})))
    core = InferenceCore(ServerSettings((tmp_path,)), {"identity": Incomplete()})
    await core.start()
    try:
        assert core.model_ready("fine")
        assert failure(core) == (
            "ensemble 'ens' cannot be loaded: step 'm': input 'X' is required, but the backend never produces output "
            "'Y' of 'm'; mark the input as optional"
        )
    finally:
        await core.stop()


async def test_ensembles_that_contain_each_other(tmp_path: Path) -> None:
    for one, other in (("one", "two"), ("two", "one")):
        write_model(tmp_path, one, ensemble(step(other, {"X": "X"}, {"Y": "Y"})))
    async with serving(tmp_path) as core:
        assert failure(core, "one") == "ensemble 'one' contains itself through its steps"
        assert failure(core, "two") == "ensemble 'two' contains itself through its steps"


async def test_ensemble_of_a_model_that_failed_to_load(tmp_path: Path) -> None:
    write_model(tmp_path, "m", PYTHON)
    write_model(tmp_path, "ens", ensemble(step("m", {"X": "X"}, {"Y": "Y"})))
    async with serving(tmp_path) as core:
        problem = "ensemble 'ens' cannot be loaded: step 'm': Request for unknown model: 'm' has no available versions"
        assert failure(core) == problem
