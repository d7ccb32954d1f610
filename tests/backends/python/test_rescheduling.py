"""`set_release_flags`: a model has its requests run again, in threads and in processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from llmserve.errors import InternalError, InvalidArgument
from tests.backends.python.test_api import MODES
from tests.backends.python.test_execute import DECOUPLED, ECHO_CONFIG, echo_model
from tests.backends.python.test_process import until
from tests.serving.models import collect, floats, request, serving, single, values, write_model

COUNTDOWN = """
import numpy as np
class TritonPythonModel:
    def initialize(self, args):
        self.left = {}
    %sdef execute(self, requests):
        for request in requests:
            key = request.correlation_id()
            left = self.left.pop(key, request.inputs()[0].as_numpy().item()) - 1
            values = np.array([left, request.flags()], np.float32)
            response = pb_utils.InferenceResponse([pb_utils.Tensor("Y", values)])
            if left > 0:
                self.left[key] = left
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                request.get_response_sender().send(response)
            else:
                request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
AGAIN = """
import numpy as np
class TritonPythonModel:
    def initialize(self, args):
        self.times = {}
    def execute(self, requests):
        return [self.answer(request) for request in requests]
    def answer(self, request):
        key = request.correlation_id()
        self.times[key] = self.times.get(key, 0) + 1
        if self.times[key] < request.inputs()[0].as_numpy().item():
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return None
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([self.times[key]], np.float32))])
"""
ITERATIVE = "sequence_batching { iterative_sequence: true }\n"


@MODES
@pytest.mark.parametrize("kind", ["", "async "])
async def test_decoupled_model_has_its_requests_run_again(tmp_path: Path, mode: str, kind: str) -> None:
    write_model(tmp_path, "m", ECHO_CONFIG + DECOUPLED + ITERATIVE + mode, COUNTDOWN % kind)
    async with serving(tmp_path) as core:
        answers = await asyncio.gather(*(collect(core, request("m", floats(count))) for count in (3, 1, 5)))
        await until(lambda: core.statistics("m")[0].execution_count == 9)  # the last one ends after it has answered
        statistics = core.statistics("m")[0].inference_stats
    seen = [[values(response) for response in responses] for responses in answers]
    assert seen == [
        [[2, 1], [1, 0], [0, 0]],  # START is the first execution's
        [[0, 1]],
        [[4, 1], [3, 0], [2, 0], [1, 0], [0, 0]],
    ]
    assert (statistics.success.count, statistics.fail.count) == (3, 0)


@MODES
async def test_model_answers_when_it_has_seen_a_request_often_enough(tmp_path: Path, mode: str) -> None:
    write_model(tmp_path, "m", ECHO_CONFIG + ITERATIVE + mode, AGAIN)
    async with serving(tmp_path) as core:
        answers = await asyncio.gather(*(single(core, request("m", floats(count))) for count in (4, 1, 2)))
    assert [values(answer) for answer in answers] == [[4], [1], [2]]


@MODES
async def test_only_an_iterative_model_has_its_requests_run_again(tmp_path: Path, mode: str) -> None:
    write_model(tmp_path, "m", ECHO_CONFIG + mode, AGAIN)
    async with serving(tmp_path) as core:
        with pytest.raises(InvalidArgument, match="released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the"):
            await single(core, request("m", floats(2)))
        assert values(await single(core, request("m", floats(1)))) == [2]


async def test_release_flags_that_are_none(tmp_path: Path) -> None:
    body = "request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)\n        request.set_release_flags(3)"
    write_model(tmp_path, "m", ECHO_CONFIG, echo_model(body))
    async with serving(tmp_path) as core:
        with pytest.raises(InternalError, match="Unsupported release flag: 3"):
            await single(core, request("m", floats(1)))


async def test_a_request_that_is_to_run_again_has_no_answer_yet(tmp_path: Path) -> None:
    body = """
        request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)])"""
    write_model(tmp_path, "m", ECHO_CONFIG + ITERATIVE, echo_model(body))
    async with serving(tmp_path) as core:
        with pytest.raises(InternalError, match="Expected a None object in the execute function return list"):
            await single(core, request("m", floats(1)))
