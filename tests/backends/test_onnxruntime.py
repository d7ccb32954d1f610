"""ONNX models: completed from the file, checked against the config, run in batches."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.backends.onnxruntime import OnnxRuntimeBackend
from llmserve.serving.config.features import has_gpu
from llmserve.serving.core import InferenceCore
from llmserve.serving.types import Tensor
from tests.serving.models import collect, floats, request, serving, single, tensors, values, write_model

FLOAT, INT64, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING


Values = Sequence[onnx.ValueInfoProto]


def save(path: Path, nodes: list[onnx.NodeProto], inputs: Values, outputs: Values) -> None:
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path)


def info(name: str, kind: int, *shape: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def write_sum(repository: Path, name: str, config: str, *, batch: int | str = "batch") -> Path:
    """SUM[b, 2] = A[b, 2] + B[b, 2]."""
    directory = write_model(repository, name, config)
    pair = [info("A", FLOAT, batch, 2), info("B", FLOAT, batch, 2)]
    save(
        directory / "1/model.onnx", [helper.make_node("Add", ["A", "B"], ["SUM"])], pair, [info("SUM", FLOAT, batch, 2)]
    )
    return directory


def pair(*rows: tuple[float, float]) -> tuple[Tensor, Tensor]:
    array = np.array(rows, np.float32)
    return Tensor("A", "FP32", array), Tensor("B", "FP32", array)


def reason(core: InferenceCore, name: str) -> str:
    (status,) = [status for status in core.repository_index() if status.name == name]
    return status.reason


def test_the_batch_size_of_a_model_that_does_not_say(tmp_path: Path) -> None:
    directory = write_sum(tmp_path, "sum", "")
    config = OnnxRuntimeBackend(default_max_batch_size=16).complete_config(ModelConfig(name="sum"), directory)
    assert (config.max_batch_size, config.HasField("dynamic_batching")) == (16, True)


@pytest.mark.parametrize("name", ['backend: "onnxruntime"', 'platform: "onnxruntime_onnx"'])
async def test_the_config_is_completed_from_the_model(tmp_path: Path, name: str) -> None:
    write_sum(tmp_path, "sum", name)
    async with serving(tmp_path) as core:
        config = core.model_config("sum")
        assert (config.platform, config.backend) == ("onnxruntime_onnx", "onnxruntime")
        assert (config.max_batch_size, config.HasField("dynamic_batching")) == (4, True)
        metadata = core.model_metadata("sum")
        assert [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in metadata.inputs] == [
            ("A", "FP32", [-1, 2]),
            ("B", "FP32", [-1, 2]),
        ]
        assert [tensor.name for tensor in metadata.outputs] == ["SUM"]
        assert values(await single(core, request("sum", *pair((1, 2), (3, 4)))), "SUM") == [[2, 4], [6, 8]]


async def test_a_fixed_first_dimension_is_no_batch(tmp_path: Path) -> None:
    write_sum(tmp_path, "sum", 'backend: "onnxruntime"', batch=1)
    write_sum(tmp_path, "batched", 'backend: "onnxruntime" max_batch_size: 8', batch=1)
    async with serving(tmp_path) as core:
        assert core.model_config("sum").max_batch_size == 0
        assert list(core.model_config("sum").input[0].dims) == [1, 2]
        assert "max_batch_size is 8, but the first dimension" in reason(core, "batched")


async def test_requests_are_run_in_one_batch_and_answered_apart(tmp_path: Path) -> None:
    batching = "preferred_batch_size: 4 max_queue_delay_microseconds: 600000000"
    write_sum(tmp_path, "sum", f'backend: "onnxruntime" dynamic_batching {{ {batching} }}')
    async with serving(tmp_path) as core:
        answers = await asyncio.gather(*(single(core, request("sum", *pair((i, -i)))) for i in range(4)))
        assert [values(answer, "SUM") for answer in answers] == [[[2 * i, -2 * i]] for i in range(4)]
        assert core.statistics("sum")[0].execution_count == 1


async def test_every_mismatch_with_the_model_is_reported(tmp_path: Path) -> None:
    config = tensors("input", A="INT32 [ 2 ]", C="FP32 [ 2 ]") + tensors("output", SUM="FP32 [ 3 ]")
    write_sum(tmp_path, "sum", f'backend: "onnxruntime" max_batch_size: 4 {config}')
    async with serving(tmp_path) as core:
        text = reason(core, "sum")
    assert "input 'A' is INT32 in the config but FP32 in the model" in text
    assert "the model has no input 'C'; it has: A, B" in text
    assert "the model's input 'B' is not in the config" in text
    assert "output 'SUM' has shape [-1,3] in the config but [-1,2] in the model" in text


async def test_strings_and_scalars(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "text", 'backend: "onnxruntime"')
    nodes = [helper.make_node("Identity", ["X"], ["Y"]), helper.make_node("Size", ["X"], ["N"])]
    save(directory / "1/model.onnx", nodes, [info("X", STRING, "n")], [info("Y", STRING, "n"), info("N", INT64)])
    async with serving(tmp_path) as core:
        assert list(core.model_config("text").output[1].dims) == [1]
        given = Tensor("X", "BYTES", np.array(["näh".encode(), b""], dtype=object))
        answer = await single(core, request("text", given))
        assert values(answer) == ["näh".encode(), b""]
        assert values(answer, "N") == [2]
        (bad,) = await collect(core, request("text", Tensor("X", "BYTES", np.array([b"\xff"], dtype=object))))
        assert "must be UTF-8 text" in str(bad.error)


async def test_one_bad_request_of_a_batch_spares_the_others(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "pick", 'backend: "onnxruntime" max_batch_size: 4')
    table = helper.make_tensor("T", FLOAT, [3], [10.0, 11.0, 12.0])
    nodes = [helper.make_node("Constant", [], ["T"], value=table), helper.make_node("Gather", ["T", "I"], ["Y"])]
    save(directory / "1/model.onnx", nodes, [info("I", INT64, "b", 1)], [info("Y", FLOAT, "b", 1)])
    async with serving(tmp_path) as core:
        asked = [request("pick", Tensor("I", "INT64", np.array([[i]]))) for i in (0, 7, 2)]
        first, bad, last = await asyncio.gather(*(collect(core, one) for one in asked))
    assert (values(first[0]), values(last[0])) == ([[10]], [[12]])
    assert "model 'pick' failed" in str(bad[0].error)


async def test_settings_reach_the_session_and_wrong_ones_are_reported(tmp_path: Path) -> None:
    def parameter(key: str, value: str) -> str:
        return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'

    good = parameter("intra_op_thread_count", "1") + parameter("execution_mode", "1")
    write_sum(tmp_path, "good", f'backend: "onnxruntime" {good} optimization {{ graph {{ level: -1 }} }}')
    bad = parameter("intra_op_thread_count", "many") + parameter("execution_mode", "7")
    write_sum(tmp_path, "bad", f'backend: "onnxruntime" {bad} optimization {{ graph {{ level: 5 }} }}')
    gpu = 'backend: "onnxruntime" instance_group { kind: KIND_GPU }'
    write_sum(tmp_path, "gpu", gpu)
    async with serving(tmp_path) as core:
        assert core.model_ready("good")
        text = reason(core, "bad")
        if not has_gpu():
            assert "has kind KIND_GPU but no GPUs are available" in reason(core, "gpu")
    assert "intra_op_thread_count must be an integer, got 'many'" in text
    assert "execution_mode must be 0" in text
    assert "level must be one of" in text


async def test_broken_and_missing_files(tmp_path: Path) -> None:
    write_model(tmp_path, "empty", 'backend: "onnxruntime"')
    broken = write_model(tmp_path, "broken", 'backend: "onnxruntime"')
    (broken / "1/model.onnx").write_bytes(b"nothing")
    async with serving(tmp_path) as core:
        assert "broken/1/model.onnx cannot be loaded" in reason(core, "broken")
        assert reason(core, "empty")


async def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "llmserve.backends.onnxruntime.session", raising=False)
    write_sum(tmp_path, "sum", 'backend: "onnxruntime"')
    async with serving(tmp_path) as core:
        assert "pip install 'llmserve[onnx]'" in reason(core, "sum")


async def test_floats_are_checked_by_the_core_before_the_model(tmp_path: Path) -> None:
    write_sum(tmp_path, "sum", 'backend: "onnxruntime"')
    async with serving(tmp_path) as core:
        with pytest.raises(Exception, match="expected 2 inputs but got 1"):
            await single(core, request("sum", floats(1, 2, name="A")))


async def test_sequences_with_controls_and_state(tmp_path: Path) -> None:
    """TOTAL = STATE * (1 - START) + X, which is the next STATE, too."""
    batching = """
        control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
        state { input_name: "STATE" output_name: "NEXT" data_type: TYPE_FP32 dims: [ 1 ] }
        oldest { max_candidate_sequences: 4 }
    """
    config = f'backend: "onnxruntime" max_batch_size: 4 sequence_batching {{ {batching} }}'
    directory = write_model(tmp_path, "total", config)
    nodes = [
        helper.make_node("Constant", [], ["one"], value_float=1.0),
        helper.make_node("Sub", ["one", "START"], ["goes_on"]),
        helper.make_node("Mul", ["STATE", "goes_on"], ["kept"]),
        helper.make_node("Add", ["kept", "X"], ["TOTAL"]),
        helper.make_node("Identity", ["TOTAL"], ["NEXT"]),
    ]
    inputs = [info(name, FLOAT, "batch", 1) for name in ("X", "START", "STATE")]
    save(directory / "1/model.onnx", nodes, inputs, [info(name, FLOAT, "batch", 1) for name in ("TOTAL", "NEXT")])

    async def add(core: InferenceCore, sequence_id: int, value: float, *, start: bool = False) -> object:
        x = Tensor("X", "FP32", np.array([[value]], np.float32))
        answer = await single(core, request("total", x, sequence_id=sequence_id, sequence_start=start))
        return [(tensor.name, tensor.data.item()) for tensor in answer.outputs]

    async with serving(tmp_path) as core:
        assert reason(core, "total") == ""
        assert [tensor.name for tensor in core.model_config("total").input] == ["X"]
        starts = await asyncio.gather(*(add(core, i, i, start=True) for i in range(1, 5)))
        assert starts == [[("TOTAL", i)] for i in range(1, 5)]
        assert await add(core, 3, 10) == [("TOTAL", 13)]
        assert await add(core, 3, 10) == [("TOTAL", 23)]
        assert await add(core, 3, 7, start=True) == [("TOTAL", 7)]
