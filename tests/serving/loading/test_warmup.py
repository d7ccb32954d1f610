"""`model_warmup`: what the instances get before the model is ready, and what keeps it from being loaded."""

from __future__ import annotations

import json
import logging
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.serving.tensor_data import random_tensor, tensor_from_bytes, zero_tensor
from llmserve.serving.types import NUMPY_DTYPES
from tests.serving.models import floats, identity_config, request, serving, single, values, write_model

RECORD = """
import json, pathlib
LOG = pathlib.Path(__file__).parent.parent / "log"
class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]
    def execute(self, requests):
        with LOG.open("a") as log:
            for r in requests:
                values = {t.name(): [str(t.as_numpy().dtype), t.as_numpy().shape, str(t.as_numpy().tolist())]
                          for t in r.inputs()}
                log.write(json.dumps([self.name, len(requests), r.request_id(), values]) + "\\n")
        outputs = [pb_utils.Tensor("Y", r.inputs()[0].as_numpy()) for r in requests]
        return [pb_utils.InferenceResponse([output]) for output in outputs]
"""


def recorded(directory: Path) -> list[Any]:
    return [json.loads(line) for line in (directory / "log").read_text().splitlines()]


def python_config(extra: str, dims: str = "[ 2 ]") -> str:
    return identity_config(extra, dims).replace("identity", "python")


def warmup(data: str, *, name: str = "w", extra: str = "batch_size: 1", dims: str = "[ 2 ]") -> str:
    tensor = f'key: "X" value {{ data_type: TYPE_FP32 dims: {dims} {data} }}'
    return f'model_warmup {{ name: "{name}" {extra} inputs {{ {tensor} }} }}\n'


async def test_every_instance_runs_every_sample_before_the_model_is_ready(tmp_path: Path) -> None:
    config = python_config(
        "max_batch_size: 4 instance_group { count: 2 }\n"
        + warmup("zero_data: true", name="zero", extra="batch_size: 2 count: 3")
        + warmup("random_data: true", name="random")
    )
    directory = write_model(tmp_path, "m", config, RECORD)
    async with serving(tmp_path) as core:
        assert core.ready()
        (statistics,) = core.statistics("m")
        assert (statistics.inference_count, statistics.execution_count) == (0, 0)
    runs = recorded(directory)
    for instance in ("m_0_0", "m_0_1"):
        own = [run for run in runs if run[0] == instance]
        assert [run[2] for run in own] == ["warmup:zero"] * 6 + ["warmup:random"]
        assert {run[1] for run in own[:6]} == {2}  # three executions of two requests
        assert own[0][3]["X"] == ["float32", [1, 2], "[[0.0, 0.0]]"]
        assert own[-1][3]["X"][2] != "[[0.0, 0.0]]"


async def test_data_from_a_file(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "m", python_config(warmup('input_data_file: "numbers"')), RECORD)
    (directory / "warmup").mkdir()
    (directory / "warmup" / "numbers").write_bytes(np.array([3, 4], "<f4").tobytes())
    async with serving(tmp_path) as core:
        assert core.ready()
    assert recorded(directory)[0][3]["X"] == ["float32", [2], "[3.0, 4.0]"]


async def test_reshape_is_applied(tmp_path: Path) -> None:
    config = python_config(warmup("zero_data: true"), dims="[ 2 ] reshape { shape: [ 1, 2 ] }")
    directory = write_model(tmp_path, "m", config, RECORD)
    async with serving(tmp_path) as core:
        assert core.ready()
    assert recorded(directory)[0][3]["X"][1] == [1, 2]


async def test_failure_of_the_model_is_a_load_error_and_its_instances_are_closed(tmp_path: Path) -> None:
    code = """
import pathlib
class TritonPythonModel:
    def execute(self, requests):
        raise ValueError("boom")
    def finalize(self):
        pathlib.Path(__file__).with_name("finalized").touch()
"""
    directory = write_model(tmp_path, "m", python_config(warmup("zero_data: true", name="first sample")), code)
    write_model(tmp_path, "good", identity_config())
    async with serving(tmp_path) as core:
        (reason,) = [row.reason for row in core.repository_index() if row.name == "m"]
        assert "failed to run warmup sample 'first sample': " in reason
        assert "boom" in reason
        assert (directory / "1" / "finalized").exists()
        assert values(await single(core, request("good", floats(1)))) == [1]


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        (warmup("zero_data: true", extra="batch_size: 2"), "model_warmup 'w': batch_size must be in 1 .. 1, got 2"),
        (warmup("zero_data: true", name=""), "a model_warmup has no name"),
        (warmup(""), "input 'X' has none of zero_data, random_data and input_data_file"),
        (warmup("zero_data: true", dims="[ -2 ]"), "dims must not be negative, got [-2]"),
        (
            warmup("zero_data: true", dims="[ 3 ]"),
            "model_warmup 'w': [request id: warmup:w] unexpected shape for input 'X'",
        ),
        (warmup('input_data_file: "nope"'), "No such file"),
        (
            warmup('input_data_file: "short"'),
            "file 'short' for input 'X': expected 8 bytes for 2 elements of FP32, got 5",
        ),
        ('model_warmup { name: "w" batch_size: 1 }', "missing required input(s) ['X']"),
    ],
)
async def test_sample_that_is_no_request(tmp_path: Path, extra: str, problem: str) -> None:
    directory = write_model(tmp_path, "m", python_config(extra), RECORD)
    (directory / "warmup").mkdir()
    (directory / "warmup" / "short").write_bytes(b"12345")
    async with serving(tmp_path) as core:
        (row,) = core.repository_index()
    assert row.state == "UNAVAILABLE"
    assert problem in row.reason


async def test_sample_without_a_batch_size_does_not_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Triton skips it, so the rest of such a repository works there."""
    extra = warmup("", extra="") + warmup("zero_data: true", name="runs")
    directory = write_model(tmp_path, "m", python_config(extra), RECORD)
    async with serving(tmp_path) as core:
        assert core.ready()
    assert len(recorded(directory)) == 1
    assert [line for line in caplog.messages if "model_warmup has no effect: a sample runs only with" in line]


async def test_setting_is_not_reported_as_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path, "m", python_config(warmup("zero_data: true")), RECORD)
    with caplog.at_level(logging.WARNING):
        async with serving(tmp_path):
            pass
    assert not caplog.messages


@pytest.mark.parametrize("datatype", sorted(NUMPY_DTYPES))
def test_made_tensors_of_every_datatype(datatype: str) -> None:
    for tensor in (
        zero_tensor("t", datatype, (2, 3)),
        random_tensor("t", datatype, (2, 3), np.random.default_rng(0)),
    ):
        assert (tensor.shape, tensor.data.dtype) == ((2, 3), NUMPY_DTYPES[datatype])
    if datatype != "BYTES":
        raw = zero_tensor("t", datatype, (2, 3)).data.tobytes()
        assert not tensor_from_bytes("t", datatype, (2, 3), raw).data.any()


def test_texts_from_bytes() -> None:
    data = b"".join(struct.pack("<I", len(text)) + text for text in (b"ab", b""))
    assert tensor_from_bytes("t", "BYTES", (2,), data).data.tolist() == [b"ab", b""]
    for wrong, problem in ((data[:-1], "truncated"), (data[:5], "truncated"), (data * 2, "expected 2 strings, got 4")):
        with pytest.raises(ValueError, match=problem):
            tensor_from_bytes("t", "BYTES", (2,), wrong)
