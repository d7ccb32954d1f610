"""The core: look-up, deadline, drain, statistics and metrics; what the server says about itself."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve import __version__
from llmserve.backends.identity import IdentityBackend
from llmserve.errors import DeadlineExceeded, InternalError, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from llmserve.metrics import METRICS
from llmserve.serving.backend import LoadContext, LoadedModel
from llmserve.serving.core import InferenceCore, ServerSettings
from llmserve.serving.types import InferRequest, InferResponse, Tensor
from tests.serving.models import (
    BACKENDS,
    collect,
    floats,
    identity_config,
    request,
    serving,
    single,
    values,
    write_model,
)

SLOW = identity_config('parameters { key: "execute_delay_ms" value { string_value: "60" } }')
HANGS = identity_config('parameters { key: "execute_delay_ms" value { string_value: "60000" } }')


async def test_what_the_server_says_about_itself(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config("max_batch_size: 4", dims="[ 2, -1 ]"))
    async with serving(tmp_path) as core:
        assert (core.name, core.version) == ("llmserve", __version__)
        assert {"statistics", "binary_tensor_data", "parameters"} <= set(core.extensions)
        assert core.live()
        assert core.ready()
        metadata = core.model_metadata("m")
        assert (metadata.name, list(metadata.versions), metadata.platform) == ("m", ["1"], "identity")
        (declared,) = metadata.inputs
        assert (declared.name, declared.datatype, list(declared.shape)) == ("X", "FP32", [-1, 2, -1])
        assert core.model_config("m", "1").instance_group[0].name == "m"
        with pytest.raises(NotFound, match="Request for unknown model: 'nope' is not found"):
            core.model_metadata("nope")
        with pytest.raises(NotFound, match=r"'mm' is not found; did you mean 'm'\?"):
            core.model_metadata("mm")


async def test_not_ready_and_closed_before_start(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config())
    core = InferenceCore(ServerSettings((tmp_path,)), BACKENDS)
    assert not core.ready()
    with pytest.raises(Unavailable, match="Server is starting"):
        await single(core, request("m", floats(1)))


class Slow(IdentityBackend):
    """Loads the model `late` when it is let go, any other at once."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def load(self, context: LoadContext) -> LoadedModel:
        if context.config.name == "late":
            self.let_go.wait()
        return super().load(context)


async def test_no_model_is_ready_before_the_server_has_started(tmp_path: Path) -> None:
    """Just as none is served."""
    write_model(tmp_path, "late", identity_config())
    write_model(tmp_path, "quick", identity_config())
    backend = Slow()
    core = InferenceCore(ServerSettings((tmp_path,)), {"identity": backend})
    starting = asyncio.create_task(core.start())
    try:
        for _ in range(500):
            if core.repository_index(ready=True):
                break
            await asyncio.sleep(0.01)
        assert [(row.name, row.state) for row in core.repository_index()] == [("late", "LOADING"), ("quick", "READY")]
        assert not core.model_ready("quick")
        with pytest.raises(Unavailable, match="Server is starting"):
            await single(core, request("quick", floats(1)))
    finally:
        backend.let_go.set()
        await starting
    assert core.model_ready("quick")


async def test_a_cancelled_start_waits_for_no_model(tmp_path: Path) -> None:
    write_model(tmp_path, "late", identity_config())
    backend = Slow()
    core = InferenceCore(ServerSettings((tmp_path,)), {"identity": backend})
    starting = asyncio.create_task(core.start())
    await asyncio.sleep(0.05)
    starting.cancel()
    try:
        async with asyncio.timeout(30):
            await asyncio.gather(starting, return_exceptions=True)
        (loading,) = [thread for thread in threading.enumerate() if thread.name == "load-late"]
        assert loading.daemon
    finally:
        backend.let_go.set()
    loading.join()


async def test_deadline_that_has_passed(tmp_path: Path) -> None:
    write_model(tmp_path, "m", SLOW)
    async with serving(tmp_path) as core:
        with pytest.raises(DeadlineExceeded, match="Deadline exceeded for model 'm'"):
            await single(core, request("m", floats(1), deadline=time.monotonic() - 1))
        with pytest.raises(DeadlineExceeded):
            await single(core, request("m", floats(1), deadline=time.monotonic() + 0.02))
        assert values(await single(core, request("m", floats(1), deadline=time.monotonic() + 60))) == [1]
        assert core.statistics("m")[0].inference_stats.fail.count == 2


async def test_drain_refuses_new_requests_and_finishes_running_ones(tmp_path: Path) -> None:
    write_model(tmp_path, "m", SLOW)
    steps = [
        f'step {{ model_name: "m" input_map {{ key: "X" value: "{x}" }} output_map {{ key: "Y" value: "{y}" }} }}'
        for x, y in (("X", "t"), ("t", "Y"))
    ]
    ensemble = identity_config("ensemble_scheduling { " + " ".join(steps) + " }")
    write_model(tmp_path, "ens", ensemble.replace('backend: "identity"', 'platform: "ensemble"'))
    core = InferenceCore(ServerSettings((tmp_path,)), BACKENDS)
    await core.start()
    running = asyncio.create_task(single(core, request("ens", floats(7))))
    await asyncio.sleep(0.02)
    stopping = asyncio.create_task(core.stop(5))
    await asyncio.sleep(0)
    assert core.live()
    assert not core.ready()
    assert not core.model_ready("m")
    with pytest.raises(Unavailable, match="Server is stopping"):
        await single(core, request("m", floats(1)))
    assert not stopping.done()
    assert values(await running) == [7]  # its second step was started while draining
    async with asyncio.timeout(30):
        await stopping
    assert core.repository_index(ready=True) == []


async def test_drain_gives_up_after_its_timeout(tmp_path: Path) -> None:
    write_model(tmp_path, "m", HANGS)
    core = InferenceCore(ServerSettings((tmp_path,)), BACKENDS)
    await core.start()
    running, waiting = (asyncio.create_task(single(core, request("m", floats(i)))) for i in range(2))
    await asyncio.sleep(0.01)
    async with asyncio.timeout(30):
        await core.stop(0.05)
        with pytest.raises(Unavailable, match="is being unloaded"):
            await waiting
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_abandoned_requests_do_not_hold_up_the_drain(tmp_path: Path) -> None:
    write_model(tmp_path, "m", HANGS)
    core = InferenceCore(ServerSettings((tmp_path,)), BACKENDS)
    await core.start()
    running = asyncio.create_task(single(core, request("m", floats(1))))
    await asyncio.sleep(0.01)
    running.cancel()
    async with asyncio.timeout(30):
        await core.stop(300)


async def test_statistics_in_numbers(tmp_path: Path) -> None:
    config = identity_config("max_batch_size: 8", dims="[ 1 ]")
    write_model(tmp_path, "m", config)
    async with serving(tmp_path) as core:
        before_ms = time.time() * 1000
        for size in (1, 3, 3):
            await single(core, request("m", Tensor("X", "FP32", np.zeros((size, 1), np.float32))))
        with pytest.raises(InvalidArgument):
            await single(core, request("m", floats(1)))
        (statistics,) = core.statistics("m")
        assert [model.name for model in core.statistics()] == ["m"]
        assert len(core.statistics("m", "1")) == 1
        with pytest.raises(InvalidArgument, match="requested model 'x' is not available"):
            core.statistics("x")
    assert (statistics.name, statistics.version) == ("m", "1")
    assert (statistics.inference_count, statistics.execution_count) == (7, 3)
    assert before_ms - 1 <= statistics.last_inference <= time.time() * 1000 + 1
    stats = statistics.inference_stats
    parts = [stats.queue, stats.compute_input, stats.compute_infer, stats.compute_output]
    # what does not fit the config is nothing that the model has failed at
    assert [part.count for part in (stats.success, stats.fail, *parts)] == [3, 0, 3, 3, 3, 3]
    assert stats.success.ns >= sum(part.ns for part in parts) > 0
    assert {batch.batch_size: batch.compute_infer.count for batch in statistics.batch_stats} == {1: 1, 3: 2}


async def test_metrics_in_numbers(tmp_path: Path) -> None:
    write_model(tmp_path, "m", SLOW)
    async with serving(tmp_path) as core:
        await single(core, request("m", floats(1)))
        tasks = [asyncio.create_task(single(core, request("m", floats(1)))) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert sample(core, "nv_inference_pending_request_count") == 2
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        text = core.metrics_text()
        assert sample(core, "nv_inference_request_success") == 2
        assert sample(core, "nv_inference_count") == 2
        assert sample(core, "nv_inference_exec_count") == 2
        assert sample(core, "nv_inference_pending_request_count") == 0
        assert 2 * 60_000 <= sample(core, "nv_inference_compute_infer_duration_us") < 2 * 600_000
        assert sample(core, "nv_inference_request_duration_us") >= sample(
            core, "nv_inference_compute_infer_duration_us"
        )
    for reason, count in (("CANCELED", 2), ("REJECTED", 0), ("BACKEND", 0), ("OTHER", 0)):
        assert f'nv_inference_request_failure{{model="m",reason="{reason}",version="1"}} {count}\n' in text
    assert re.search(r"^nv_cpu_utilization (0|1|0\.\d+|1\.0)$", text, re.MULTILINE)
    assert re.search(r"^nv_cpu_memory_total_bytes \d{9,}$", text, re.MULTILINE)


async def test_metrics_text_is_well_formed_and_declared(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config())
    async with serving(tmp_path) as core:
        text = core.metrics_text()
    assert "_total{" not in text  # counters keep Triton's names
    families = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    assert len(families) == len({name for name, _ in families})
    assert all(METRICS[name].kind == kind for name, kind in families)
    for line in text.splitlines():
        assert line.startswith("# ") or re.fullmatch(r'[a-z_]+(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? \S+', line)


class Faulty:
    """A backend whose only instance does what the first element of X says."""

    name = "faulty"

    def complete_config(self, config: ModelConfig, model_dir: Path) -> ModelConfig:
        return config

    def load(self, context: LoadContext) -> LoadedModel:
        return LoadedModel([self], batches_itself=True, gauges=lambda: [("nv_faults", {"kind": "x"}, 2.5)])

    def execute(self, requests: Sequence[InferRequest]) -> Sequence[AsyncGenerator[InferResponse, None]]:
        return [self._respond(wanted) for wanted in requests]

    async def _respond(self, wanted: InferRequest) -> AsyncGenerator[InferResponse, None]:
        match wanted.inputs["X"].data[0]:
            case 1:
                raise RuntimeError("boom")
            case 2:
                yield InferResponse("f", "1", "", (floats(1, name="Y"),))
                raise InvalidArgument("not this")
            case 4:
                raise ResourceExhausted("the queue is full")
            case 5:
                yield InferResponse("f", "1", "", error=ResourceExhausted("the queue is full"), final=True)
            case 3:
                yield InferResponse("f", "1", "", (floats(1, name="Y"),))

    def healthy(self) -> bool:
        return True

    async def close(self) -> None:
        raise RuntimeError("no way out")


@pytest.fixture
async def faulty(tmp_path: Path) -> AsyncIterator[InferenceCore]:
    config = identity_config("model_transaction_policy { decoupled: true }")
    write_model(tmp_path, "f", config.replace("identity", "faulty"))
    core = InferenceCore(ServerSettings((tmp_path,)), {"faulty": Faulty()})
    await core.start()
    yield core
    await core.stop(1)


async def test_a_backends_exception_is_an_error_response(faulty: InferenceCore) -> None:
    (response,) = await collect(faulty, request("f", floats(1), request_id="r1"))
    assert isinstance(response.error, InternalError)
    assert str(response.error) == "model 'f' failed: RuntimeError: boom"
    assert (response.final, response.request_id, response.model_name) == (True, "r1", "f")
    data, end = await collect(faulty, request("f", floats(2)))
    assert (values(data), data.final) == ([1], False)
    assert (str(end.error), end.final) == ("not this", True)
    assert 'request_failure{model="f",reason="BACKEND",version="1"} 2' in faulty.metrics_text()


async def test_a_slow_reader_is_not_the_models_time(faulty: InferenceCore, tmp_path: Path) -> None:
    config = identity_config("model_transaction_policy { decoupled: true }").replace("identity", "python")
    code = (
        "class TritonPythonModel:\n    def execute(self, requests):\n"
        "        sender, (x,) = requests[0].get_response_sender(), requests[0].inputs()\n"
        "        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor('Y', x.as_numpy())]))\n"
        "        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)\n"
    )
    write_model(tmp_path / "other", "m", config, code)
    async with serving(tmp_path / "other") as queued:
        for core, wanted in ((queued, request("m", floats(3))), (faulty, request("f", floats(3)))):
            async with aclosing(core.infer_stream(wanted)) as stream:
                async for _ in stream:
                    await asyncio.sleep(0.2)
            assert 0 < core.statistics()[0].inference_stats.compute_infer.ns < 100_000_000


@pytest.mark.parametrize("how", [4, 5], ids=["raised", "answered"])
async def test_a_request_that_the_backend_has_no_room_for_was_rejected(faulty: InferenceCore, how: int) -> None:
    (response,) = await collect(faulty, request("f", floats(how)))
    assert isinstance(response.error, ResourceExhausted)
    text = faulty.metrics_text()
    assert 'request_failure{model="f",reason="REJECTED",version="1"} 1' in text
    assert 'request_failure{model="f",reason="BACKEND",version="1"} 0' in text


async def test_a_stream_always_ends_with_a_final_response(faulty: InferenceCore) -> None:
    data, end = await collect(faulty, request("f", floats(3)))
    assert (data.final, end.final, end.outputs) == (False, True, ())
    assert (await collect(faulty, request("f", floats(0))))[0].final


async def test_a_model_that_cannot_be_unloaded_spares_the_others(faulty: InferenceCore) -> None:
    await faulty.stop(1)
    assert faulty.repository_index(ready=True) == []


async def test_gauges_of_a_backend_get_the_models_labels(faulty: InferenceCore) -> None:
    assert '\nnv_faults{kind="x",model="f",version="1"} 2.5\n' in faulty.metrics_text()


async def test_closing_an_unread_stream_counts_nothing(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config())
    async with serving(tmp_path) as core:
        async with aclosing(core.infer_stream(request("m", floats(1)))):
            pass
        assert sample(core, "nv_inference_request_success") == 0


def sample(core: InferenceCore, name: str, model: str = "m") -> float:
    found = re.search(rf'^{name}{{model="{model}",version="1"}} (\S+)$', core.metrics_text(), re.MULTILINE)
    assert found is not None
    return float(found[1])
