"""Requests that are executed where they are made: which ones, what is seen of it, and whose turn it is."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.backends.python.host import ARRAYS_METHOD, INLINE_ATTRIBUTE
from llmserve.errors import InternalError, LlmserveError, NotFound, Unavailable
from llmserve.serving.core import InferenceCore
from llmserve.serving.instruments.trace import Trace
from llmserve.serving.schedulers import loop_turn
from llmserve.serving.schedulers.loop_turn import MAX_TURN_NS, LoopTurn
from llmserve.serving.types import Tensor
from tests.serving.models import collect, floats, request, serving, single, tensors, values, write_model

CONFIG = f'backend: "python"\n{tensors("input", X="FP32 [ -1 ]")}\n{tensors("output", Y="INT64 [ -1 ]")}\n'
BATCHED = f"max_batch_size: 8\n{CONFIG}"


def where_model(declared: object = 64, body: str = "") -> str:
    """Answers with the number of the thread that executes it."""
    return f"""
import threading
import numpy as np

class TritonPythonModel:
    {INLINE_ATTRIBUTE} = {declared!r}

    def execute(self, requests):
        {body}
        here = np.array([threading.get_ident()], np.int64)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", here)]) for _ in requests]
"""


async def runs_on_the_loop(core: InferenceCore, model: str = "m", count: int = 4, batched: bool = False) -> bool:
    x = Tensor("X", "FP32", np.zeros((1, count) if batched else (count,), np.float32))
    return bool(np.ravel(values(await single(core, request(model, x))))[0] == threading.get_ident())


async def test_a_brief_request_of_a_model_that_declares_it_runs_on_the_loop(tmp_path: Path) -> None:
    write_model(tmp_path, "m", CONFIG, where_model())
    async with serving(tmp_path) as core:
        assert await runs_on_the_loop(core, count=16)
        assert not await runs_on_the_loop(core, count=17)  # more than 64 bytes
        assert await runs_on_the_loop(core, count=16)


@pytest.mark.parametrize("declared", [0, False])
async def test_without_declaring_it_a_model_runs_on_its_own_thread(tmp_path: Path, declared: object) -> None:
    write_model(tmp_path, "m", CONFIG, where_model(declared))
    async with serving(tmp_path) as core:
        assert not await runs_on_the_loop(core)


@pytest.mark.parametrize("declared", [-1, 1.5, "64", None])
async def test_what_is_no_number_of_bytes_is_said_at_load(tmp_path: Path, declared: object) -> None:
    write_model(tmp_path, "m", CONFIG, where_model(declared))
    async with serving(tmp_path) as core:
        (row,) = core.repository_index()
        assert f"{INLINE_ATTRIBUTE} must be a number of bytes, got {declared!r}" in row.reason


@pytest.mark.parametrize("batching", ["", "preferred_batch_size: 4"])
async def test_batching_that_lets_nothing_wait_lets_it_run_at_once(tmp_path: Path, batching: str) -> None:
    write_model(tmp_path, "m", f"{BATCHED} dynamic_batching {{ {batching} }}", where_model())
    async with serving(tmp_path) as core:
        assert await runs_on_the_loop(core, batched=True)


async def test_strings_count_with_their_bytes(tmp_path: Path) -> None:
    config = CONFIG.replace("TYPE_FP32", "TYPE_STRING")
    write_model(tmp_path, "m", config, where_model(100))
    async with serving(tmp_path) as core:
        for length, expected in ((92, True), (93, False)):  # and eight for the array's own element
            x = Tensor("X", "BYTES", np.array([b"x" * length], dtype=object))
            assert (values(await single(core, request("m", x))) == [threading.get_ident()]) is expected


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ("parameters { key: 'inline_execution' value { string_value: 'false' } }", {}),
        ("parameters { key: 'TRITON_BATCH_STRATEGY_PATH' value { string_value: '' } }", {"inline_execution": False}),
        ("max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 10 }", {}),
        ("max_batch_size: 4 dynamic_batching { preserve_ordering: true }", {}),
        ("max_batch_size: 4 dynamic_batching { priority_levels: 2 default_priority_level: 1 }", {}),
        ("max_batch_size: 4 dynamic_batching { default_queue_policy { max_queue_size: 1 } }", {}),
        ("", {"rate_limit": "execution_count"}),
        ("response_cache { enable: true }", {"cache_bytes": 100_000}),
        ("parameters { key: 'EXECUTION_MODE' value { string_value: 'process' } }", {}),
    ],
)
async def test_whatever_decides_about_requests_keeps_them_scheduled(
    tmp_path: Path, config: str, settings: dict[str, Any]
) -> None:
    write_model(tmp_path, "m", CONFIG + config, where_model())
    async with serving(tmp_path, **settings) as core:
        assert not await runs_on_the_loop(core, batched="max_batch_size" in config)


async def test_statistics_and_traces_do_not_show_where_it_ran(tmp_path: Path) -> None:
    write_model(tmp_path, "inline", BATCHED, where_model())
    off = "parameters { key: 'inline_execution' value { string_value: 'false' } }"
    write_model(tmp_path, "scheduled", BATCHED + off, where_model())
    seen = []
    async with serving(tmp_path) as core:
        for model in ("inline", "scheduled"):
            trace = Trace(iter(range(1, 9)), timestamps=True, tensors=True)
            x = Tensor("X", "FP32", np.zeros((2, 3), np.float32))
            await single(core, request(model, x, request_id="r", trace=trace))
            with pytest.raises(LlmserveError):
                await single(core, request(model, Tensor("X", "FP32", np.zeros((9, 3), np.float32))))
            (found,) = core.statistics(model)
            stats = found.inference_stats
            durations = (stats.success, stats.queue, stats.compute_input, stats.compute_infer, stats.compute_output)
            batches = [(batch.batch_size, batch.compute_infer.count) for batch in found.batch_stats]
            names = [
                stamp["name"] if "timestamps" in record else record.get("activity", "head")
                for record in trace.records()
                for stamp in record.get("timestamps", [{}])
            ]
            seen.append(
                (
                    [duration.count for duration in durations],
                    found.execution_count,
                    found.inference_count,
                    batches,
                    names,
                )
            )
            assert stats.compute_infer.ns > 0
            assert found.last_inference > 0
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ValueError('no way')", "no way"),
        ("raise SystemExit(1)", "SystemExit"),
        ("return []", "Number of InferenceResponse objects do not match"),
        ("return [None]", "found type"),
        ("requests[0].set_release_flags(2); return None", "must return one InferenceResponse"),
        ("requests[0].get_response_sender(); return [None]", "must return one InferenceResponse"),
        ("pb_utils.InferenceRequest('', 0, [], ['Y'], 'm').exec()", "cannot call other models"),
        ("pb_utils.is_model_ready('m')", "cannot call other models"),
    ],
)
async def test_what_goes_wrong_is_the_answer_of_this_request_alone(tmp_path: Path, body: str, words: str) -> None:
    write_model(tmp_path, "m", CONFIG, where_model(body=f"if requests[0].inputs()[0].as_numpy()[0]: {body}"))
    async with serving(tmp_path) as core:
        with pytest.raises(InternalError, match=words):
            await single(core, request("m", floats(1)))
        assert await runs_on_the_loop(core)
        (found,) = core.statistics("m")
        assert (found.inference_stats.success.count, found.inference_stats.fail.count) == (1, 1)


ARRAYS = f"""
import threading
import numpy as np
from llmserve.errors import NotFound

class TritonPythonModel:
    {INLINE_ATTRIBUTE} = 64

    def execute(self, requests):
        assert threading.current_thread().name == "model-m_0"
        answers = [self.{ARRAYS_METHOD}({{t.name(): t.as_numpy() for t in request.inputs()}}) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor(*item) for item in answer.items()]) for answer in answers]

    def {ARRAYS_METHOD}(self, inputs):
        x = inputs["X"]
        if x[0] == 1: raise NotFound("there is no one")
        if x[0] == 2: raise ValueError("two is too much")
        if x[0] == 3: return None
        if x[0] == 4: return {{"Y": [4]}}
        return {{"Y": np.array([x.sum()], np.int64), "undeclared": x}}
"""


async def test_arrays_by_name_go_in_and_come_out(tmp_path: Path) -> None:
    write_model(tmp_path, "m", CONFIG, ARRAYS)
    async with serving(tmp_path) as core:
        for count in (16, 17):  # the latter on its own thread, by `execute`
            x = Tensor("X", "FP32", np.full(count, 5, np.float32))
            response = await single(core, request("m", x, request_id="r"))
            assert {tensor.name: tensor.data.tolist() for tensor in response.outputs} == {"Y": [5 * count]}
            assert (response.model_name, response.model_version, response.request_id) == ("m", "1", "r")
        for number, kind, words in (
            (1, NotFound, "^there is no one$"),
            (2, InternalError, "'m_0', message: ValueError: two is too much"),
            (3, InternalError, "'m_0', message: AttributeError"),
            (4, InternalError, "must be made from a numpy array"),
        ):
            with pytest.raises(kind, match=words):
                await single(core, request("m", floats(number)))
        assert values(await single(core, request("m", floats(6)))) == [6]


async def test_a_brief_request_does_not_wait_for_a_long_one(tmp_path: Path) -> None:
    body = f"import time, pathlib; gate = pathlib.Path({str(tmp_path / 'gate')!r})\n" + (
        "        while len(requests[0].inputs()[0].as_numpy()) > 16 and not gate.exists(): time.sleep(0.01)"
    )
    write_model(tmp_path / "models", "m", CONFIG, where_model(body=body))
    async with serving(tmp_path / "models") as core:
        long = asyncio.create_task(runs_on_the_loop(core, count=17))
        await asyncio.sleep(0.05)
        assert await runs_on_the_loop(core)
        assert not long.done()
        (tmp_path / "gate").touch()
        assert not await long


async def test_a_model_that_is_unloaded_refuses(tmp_path: Path) -> None:
    write_model(tmp_path, "m", CONFIG, where_model())
    async with serving(tmp_path) as core:
        model = core._table.find("m", "")
        await model.close()
        async with aclosing(model.infer(request("m", floats(1)))) as stream:
            with pytest.raises(Unavailable, match="is being unloaded"):
                await anext(stream)


async def test_identity_models_are_brief_unless_they_delay(tmp_path: Path) -> None:
    config = f'backend: "identity"\n{tensors("input", X="FP32 [ -1 ]")}\n{tensors("output", Y="FP32 [ -1 ]")}\n'
    write_model(tmp_path, "quick", config)
    delay = "parameters { key: 'execute_delay_ms' value { string_value: '1' } }"
    write_model(tmp_path, "slow", config + delay)
    async with serving(tmp_path) as core:
        assert core._table.find("quick", "").runs_inline
        assert not core._table.find("slow", "").runs_inline
        for model in ("quick", "slow"):
            assert values(await single(core, request(model, floats(1, 2)))) == [1, 2]


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.ns = 0

    def monotonic_ns(self) -> int:
        return self.ns


async def test_a_turn_is_over_after_five_milliseconds_and_the_next_one_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, turn = Clock(), LoopTurn()
    monkeypatch.setattr(loop_turn, "time", clock)
    assert not turn.is_over()
    clock.ns = MAX_TURN_NS
    assert not turn.is_over()
    clock.ns += 1
    assert turn.is_over()
    assert turn.is_over()
    await asyncio.sleep(0)
    assert not turn.is_over()
    clock.ns += MAX_TURN_NS + 1
    assert turn.is_over()


def test_a_turn_that_a_closed_loop_began_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, turn = Clock(), LoopTurn()
    monkeypatch.setattr(loop_turn, "time", clock)

    async def look() -> bool:
        return turn.is_over()

    loop = asyncio.new_event_loop()
    assert not loop.run_until_complete(look())
    loop.close()
    clock.ns = MAX_TURN_NS + 1
    assert not asyncio.run(look())


ENSEMBLE = f"""
platform: "ensemble"
{tensors("input", X="FP32 [ -1 ]")}
{tensors("output", Z="INT64 [ -1 ]")}
ensemble_scheduling {{
  step {{
    model_name: "count" model_version: -1
    input_map {{ key: "X" value: "X" }} output_map {{ key: "Y" value: "y" }}
  }}
  step {{
    model_name: "m" model_version: -1
    input_map {{ key: "X" value: "y" }} output_map {{ key: "Y" value: "Z" }}
  }}
}}
"""
COUNT = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for _ in range(40):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", request.inputs()[0].as_numpy())]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


async def test_between_inline_steps_others_have_the_loop_when_the_turn_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each execution takes a millisecond of the clock, so at most six of them go without a turn of the loop."""
    clock = Clock()
    monkeypatch.setattr(loop_turn, "time", clock)
    config = CONFIG.replace("INT64", "FP32") + "model_transaction_policy { decoupled: true }"
    write_model(tmp_path, "count", config, COUNT)
    write_model(tmp_path, "m", CONFIG, where_model())
    write_model(tmp_path, "ens", ENSEMBLE)
    async with serving(tmp_path) as core:
        brief = core._table.find("m", "")
        execute = brief._inline.execute_inline  # type: ignore[union-attr]

        def execute_slowly(wanted: Any) -> Any:
            clock.ns += 1_000_000
            return execute(wanted)

        monkeypatch.setattr(brief._inline, "execute_inline", execute_slowly)
        turns = 0

        def count_turn() -> None:
            nonlocal turns
            turns += 1
            asyncio.get_running_loop().call_soon(count_turn)

        count_turn()
        turns_at = []
        async with aclosing(core.infer_stream(request("ens", floats(1)))) as stream:
            async for response in stream:
                if response.outputs:
                    assert values(response, "Z") == [threading.get_ident()]
                    turns_at.append(turns)
        assert len(turns_at) == 40
        assert all(turns_at[place + 7] > turns_at[place] for place in range(33))


async def test_streams_are_not_longer_than_their_reader_asks_for(tmp_path: Path) -> None:
    """Back-pressure: an inline step runs for a response when that is pulled."""
    write_model(
        tmp_path, "count", CONFIG.replace("INT64", "FP32") + "model_transaction_policy { decoupled: true }", COUNT
    )
    write_model(tmp_path, "m", CONFIG, where_model())
    write_model(tmp_path, "ens", ENSEMBLE)
    async with serving(tmp_path) as core:
        async with aclosing(core.infer_stream(request("ens", floats(1)))) as stream:
            for _ in range(3):
                await anext(stream)
            assert core.statistics("m")[0].inference_count == 3
        assert len([r for r in await collect(core, request("ens", floats(1))) if r.outputs]) == 40
