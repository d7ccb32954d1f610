"""Python models that fail in unusual ways, or answer in a form that their config does not promise."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from llmserve.errors import InternalError
from tests.backends.python.test_execute import DECOUPLED, ECHO_CONFIG, echo_model
from tests.serving.models import collect, floats, request, serving, single, values, write_model

SENDER = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender, (x,) = request.get_response_sender(), request.inputs()
            for _ in range(int(x.as_numpy()[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x.as_numpy())]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.mark.parametrize(
    "execute",
    [
        "def execute(self, requests): asyncio.run(self.give_up())",
        "async def execute(self, requests): await self.give_up()",
    ],
    ids=["sync", "async"],
)
@pytest.mark.parametrize("name", ["asyncio.CancelledError", "KeyboardInterrupt", "GeneratorExit"])
async def test_whatever_execute_raises_ends_its_batch_alone(tmp_path: Path, execute: str, name: str) -> None:
    code = f"import asyncio\nclass TritonPythonModel:\n    async def give_up(self): raise {name}\n    {execute}\n"
    write_model(tmp_path, "m", ECHO_CONFIG, code)
    async with serving(tmp_path) as core, asyncio.timeout(30):
        for _ in range(2):
            with pytest.raises(InternalError, match=name.removeprefix("asyncio.")):
                await single(core, request("m", floats(1)))
        assert core.ready()


@pytest.mark.parametrize("decoupled", [False, True], ids=["unary", "decoupled"])
async def test_an_instance_that_stopped_working_answers_with_errors(tmp_path: Path, decoupled: bool) -> None:
    """And its ensembles are not ready either."""
    code = """
import asyncio, sys, time
class TritonPythonModel:
    async def execute(self, requests):
        time.sleep(0.1)  # the other requests arrive meanwhile
        if requests[0].inputs()[0].as_numpy()[0] == 0:
            asyncio.get_running_loop().call_soon(sys.exit)
        await asyncio.sleep(60)
"""
    write_model(tmp_path, "m", ECHO_CONFIG + (DECOUPLED if decoupled else ""), code)
    maps = 'input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" }'
    ensemble = ECHO_CONFIG.replace('backend: "python"', 'platform: "ensemble"')
    write_model(tmp_path, "ens", f'{ensemble} ensemble_scheduling {{ step {{ model_name: "m" {maps} }} }}')
    async with serving(tmp_path) as core, asyncio.timeout(30):
        assert core.model_ready("ens")
        answers = await asyncio.gather(*(collect(core, request("m", floats(i))) for i in range(4)))
        answers.append(await collect(core, request("m", floats(4))))
        assert len(answers) == 5
        for (answer,) in answers:
            assert "model instance 'm_0' has stopped working" in str(answer.error)
        assert not core.model_ready("m")
        assert not core.model_ready("ens")


async def test_a_sender_of_a_unary_model_gives_one_response(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path, "m", ECHO_CONFIG, SENDER)
    async with serving(tmp_path) as core:
        (response,) = await collect(core, request("m", floats(1), request_id="r1"))
        assert (values(response), response.final, response.request_id) == ([1], True, "r1")
        (response,) = await collect(
            core, request("m", floats(2))
        )  # the first is the answer, the model has an exception
        assert (values(response), response.final) == ([2], True)
        (response,) = await collect(core, request("m", floats(0)))
        assert "Non-decoupled model cannot send complete final before sending a response." in str(response.error)
        assert response.final
        stats = core.statistics("m")[0].inference_stats
        assert (stats.success.count, stats.fail.count) == (2, 1)
    assert "Non-decoupled model cannot send more than one response." in caplog.text


async def test_what_a_unary_model_returns_beside_its_sender_is_dropped(tmp_path: Path) -> None:
    returned = "        return [pb_utils.InferenceResponse([pb_utils.Tensor('Y', np.zeros(1, np.float32))])]\n"
    write_model(tmp_path, "m", ECHO_CONFIG, "import numpy as np\n" + SENDER + returned)
    async with serving(tmp_path) as core:
        (response,) = await collect(core, request("m", floats(1)))
        assert values(response) == [1]


async def test_a_unary_model_that_drops_its_sender_gives_one_error(tmp_path: Path) -> None:
    code = SENDER.replace("sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)", "pass")
    write_model(tmp_path, "m", ECHO_CONFIG, code)
    async with serving(tmp_path) as core, asyncio.timeout(30):
        (response,) = await collect(core, request("m", floats(0)))
        assert "dropped a request without a final response" in str(response.error)
        (response,) = await collect(core, request("m", floats(1)))
        assert (values(response), response.final) == ([1], True)


async def test_an_output_that_cannot_be_reshaped_is_an_error_response(tmp_path: Path) -> None:
    config = ECHO_CONFIG.replace('name: "Y"', 'reshape { shape: [ 1, 2 ] } name: "Y"').replace("[ -1 ]", "[ 2 ]")
    write_model(
        tmp_path, "m", config, echo_model("return pb_utils.InferenceResponse([pb_utils.Tensor('Y', np.ones((1, 3)))])")
    )
    async with serving(tmp_path) as core:
        (response,) = await collect(core, request("m", floats(1, 2), request_id="r1"))
        assert isinstance(response.error, InternalError)
        assert "output 'Y' of shape [1,3], which its config cannot reshape to [2]" in str(response.error)
        assert (response.final, response.request_id) == (True, "r1")
        assert 'nv_inference_request_failure{model="m",reason="BACKEND",version="1"} 1' in core.metrics_text()
        assert core.statistics("m")[0].inference_stats.success.count == 0
