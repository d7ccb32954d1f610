"""Sequences through the core: Python models with controls and state, in ensembles, warmed up, refused at load."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmserve.errors import InvalidArgument
from llmserve.serving.core import InferenceCore
from llmserve.serving.types import Tensor
from tests.serving.models import floats, identity_config, request, serving, single, values, write_model

ACCUMULATE = """
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for r in requests:
            given = {t.name(): t.as_numpy() for t in r.inputs()}
            total = given["SUM_IN"] + given["X"] + 100 * given["START"]
            tensors = [pb_utils.Tensor("Y", total), pb_utils.Tensor("SUM_OUT", total)]
            answers.append(pb_utils.InferenceResponse(tensors))
        return answers
"""
SEQUENCES = """
max_batch_size: 2
sequence_batching {
  direct { }
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  state { input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_FP32 dims: [ 1 ] %s }
}
"""
FROM_FILE = 'initial_state { name: "zero" data_type: TYPE_FP32 dims: [ 1 ] data_file: "start" }'


def config(state: str = "", extra: str = "") -> str:
    return identity_config(SEQUENCES % state + extra, "[ 1 ]").replace("identity", "python")


def accumulator(repository: Path, state: str = "", extra: str = "") -> Path:
    directory = write_model(repository, "m", config(state, extra), ACCUMULATE)
    (directory / "initial_state").mkdir()
    (directory / "initial_state" / "start").write_bytes(np.array([1000], "<f4").tobytes())
    return directory


async def add(core: InferenceCore, value: float, marks: str = "", model: str = "m", sequence_id: int = 7) -> float:
    tensor = Tensor("X", "FP32", np.array([[value]], np.float32))
    wanted = request(model, tensor, sequence_id=sequence_id, sequence_start=">" in marks, sequence_end="<" in marks)
    response = await single(core, wanted)
    assert [output.name for output in response.outputs] == ["Y"]
    ((total,),) = values(response)
    return float(total)


async def test_model_with_state(tmp_path: Path) -> None:
    accumulator(tmp_path, FROM_FILE)
    async with serving(tmp_path) as core:
        assert await add(core, 1, ">") == 1101
        assert await add(core, 5, ">", sequence_id=8) == 1105
        assert await add(core, 2) == 1103
        assert await add(core, 3, "<") == 1106
        with pytest.raises(InvalidArgument, match="must specify the START flag"):
            await add(core, 4)
        statistics = core.statistics("m")[0]
        text = core.metrics_text()
        assert core.model_config("m").sequence_batching.max_sequence_idle_microseconds == 1_000_000
    assert (statistics.inference_count, statistics.inference_stats.fail.count) == (4, 1)
    assert 'nv_inference_request_failure{model="m",reason="REJECTED",version="1"} 1' in text


async def test_batches_of_a_client_are_refused(tmp_path: Path) -> None:
    accumulator(tmp_path)
    rows = Tensor("X", "FP32", np.zeros((2, 1), np.float32))
    async with serving(tmp_path) as core:
        with pytest.raises(InvalidArgument, match="must specify batch-size 1 due to requirements of sequence batcher"):
            await single(core, request("m", rows, sequence_id=1, sequence_start=True))


async def test_sequence_in_an_ensemble(tmp_path: Path) -> None:
    accumulator(tmp_path)
    step = 'step { model_name: "m" input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } }'
    ensemble = identity_config(f"max_batch_size: 1 ensemble_scheduling {{ {step} }}", "[ 1 ]")
    write_model(tmp_path, "ens", ensemble.replace('backend: "identity"', 'platform: "ensemble"'))
    async with serving(tmp_path) as core:
        assert [await add(core, 1, marks, "ens") for marks in (">", "", "<")] == [101, 102, 103]
        with pytest.raises(InvalidArgument, match="in ensemble 'ens', inference request for sequence 7 to"):
            await add(core, 1, "", "ens")


async def test_warming_up_gives_controls_and_state(tmp_path: Path) -> None:
    inputs = 'inputs { key: "X" value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } }'
    start = 'inputs { key: "START" value { data_type: TYPE_FP32 dims: [ 1 ] random_data: true } }'
    accumulator(tmp_path, FROM_FILE, f'model_warmup {{ name: "w" batch_size: 2 {inputs} {start} }}')
    async with serving(tmp_path) as core:
        assert await add(core, 1, ">") == 1101


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (FROM_FILE.replace("start", "nope"), "initial state of 'SUM_IN': [Errno 2] No such file"),
        (FROM_FILE.replace("TYPE_FP32", "TYPE_FP64"), "initial_state is of another data_type"),
        (FROM_FILE.replace("[ 1 ]", "[ ]"), "dims of initial_state are [], of the state [1]"),
    ],
)
async def test_initial_state_that_cannot_be_used(tmp_path: Path, state: str, problem: str) -> None:
    accumulator(tmp_path, state)
    async with serving(tmp_path) as core:
        (row,) = core.repository_index()
    assert problem in row.reason


async def test_a_model_with_state_is_not_cached(tmp_path: Path) -> None:
    accumulator(tmp_path, extra="response_cache { enable: true }")
    write_model(tmp_path, "other", identity_config())
    async with serving(tmp_path, cache_bytes=1000) as core:
        (reason,) = [row.reason for row in core.repository_index() if row.name == "m"]
        assert values(await single(core, request("other", floats(1)))) == [1]
    assert "response_cache: the answers of a model with sequences depend on its state" in reason
