"""What a config need not say: the backend and the file from the files; the rest from the model; and saying it all."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.serving.backend import LoadContext, substitute_directory
from llmserve.serving.config.auto_complete import complete_backend
from llmserve.serving.config.pbtxt import parse_config_text
from tests.serving.models import floats, identity_config, request, serving, single, tensors, values, write_model

COMPLETE = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(0)
        return config
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy() + 1)]) for r in requests]
"""
TENSORS = f"{tensors('input', X='FP32 [ -1 ]')}\n{tensors('output', Y='FP32 [ -1 ]')}"


def completed(tmp_path: Path, text: str, *files: str, name: str = "m") -> tuple[str, str, str]:
    for file in files:
        (tmp_path / file).touch()
    config, _ = parse_config_text(text)
    config.name = name
    complete_backend(config, tmp_path, {"identity", "python"})
    return config.backend, config.platform, config.default_model_filename


@pytest.mark.parametrize(
    ("text", "files", "expected"),
    [
        ("", ["model.py"], ("python", "", "model.py")),
        ("", ["model.onnx"], ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ("", ["model.pt"], ("pytorch", "pytorch_libtorch", "model.pt")),
        ("", ["model.pt2"], ("pytorch", "", "model.pt2")),
        ("", [], ("", "", "")),
        ("platform: 'onnxruntime_onnx'", [], ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ("platform: 'pytorch_libtorch'", ["model.py"], ("pytorch", "pytorch_libtorch", "model.pt")),
        ("backend: 'pytorch'", ["model.pt2"], ("pytorch", "", "model.pt2")),
        ("backend: 'pytorch'", [], ("pytorch", "pytorch_libtorch", "model.pt")),
        ("backend: 'python'", [], ("python", "", "model.py")),
        ("backend: 'python' default_model_filename: 'other.py'", [], ("python", "", "other.py")),
        ("default_model_filename: 'model.onnx'", [], ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ("backend: 'identity'", ["model.py"], ("identity", "", "")),
        ("platform: 'caffe2_netdef'", ["model.py"], ("", "caffe2_netdef", "")),
    ],
)
def test_backend_platform_and_file(tmp_path: Path, text: str, files: list[str], expected: tuple[str, str, str]) -> None:
    assert completed(tmp_path, text, *files) == expected


def test_backend_in_the_name_of_the_directory(tmp_path: Path) -> None:
    assert completed(tmp_path, "", name="small.identity") == ("identity", "", "")
    assert completed(tmp_path, "", name="small.unheard") == ("", "", "")


async def test_a_model_without_a_config(tmp_path: Path) -> None:
    write_model(tmp_path, "m", "", COMPLETE)
    (tmp_path / "m/config.pbtxt").unlink()
    async with serving(tmp_path) as core:
        assert core.ready(), core.repository_index()
        assert values(await single(core, request("m", floats(1)))) == [2]
        config = core.model_config("m")
        assert (config.name, config.backend, config.default_model_filename) == ("m", "python", "model.py")


async def test_nothing_is_completed_when_that_is_disabled(tmp_path: Path) -> None:
    write_model(tmp_path, "absent", "", COMPLETE)
    (tmp_path / "absent/config.pbtxt").unlink()
    write_model(tmp_path, "partial", 'backend: "python"', COMPLETE)
    write_model(
        tmp_path, "full", f'backend: "python"\n{TENSORS}', COMPLETE.replace("return config", "raise ValueError")
    )
    async with serving(tmp_path, auto_complete=False) as core:
        rows = {row.name: row for row in core.repository_index()}
        assert "config.pbtxt is missing in" in rows["absent"].reason
        assert "auto-complete is disabled" in rows["absent"].reason
        assert "it declares no output" in rows["partial"].reason
        assert rows["full"].state == "READY"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (TENSORS, r"config.pbtxt names no backend, and no file says which one it is for; known backends: identity"),
        ('platform: "caffe2_netdef"\n' + TENSORS, "unknown platform 'caffe2_netdef'; write backend: one of identity"),
        ('platform: "tensorrt_plan"\n' + TENSORS, "unknown backend 'tensorrt'; known backends: identity"),
    ],
)
async def test_a_backend_that_cannot_be_told(tmp_path: Path, config: str, words: str) -> None:
    write_model(tmp_path, "m", config)
    async with serving(tmp_path) as core:
        assert words in core.repository_index()[0].reason


async def test_neither_config_nor_known_files(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config())
    (tmp_path / "m/config.pbtxt").unlink()
    async with serving(tmp_path) as core:
        assert f"config.pbtxt is missing in {tmp_path}/m, and no file says" in core.repository_index()[0].reason


def test_the_models_directory_in_parameters() -> None:
    text = 'parameters { key: "env" value { string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" } }'
    config = text_format.Parse(text, ModelConfig())
    context = LoadContext(config, Path("/r/m"), "1", Path("/r/m/1"), infer=lambda request: None)  # type: ignore[arg-type,return-value]
    assert context.parameter("env") == "/r/m/env.tar.gz"
    assert context.parameter("other", "$$TRITON_MODEL_DIRECTORY") == "$$TRITON_MODEL_DIRECTORY"
    assert substitute_directory("a/$$TRITON_MODEL_DIRECTORY", Path("/r/m")) == "a/$$TRITON_MODEL_DIRECTORY"
