"""The classification extension: the top classes of an output, with labels from the model's directory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from llmserve.backends.identity import IdentityBackend
from llmserve.errors import InvalidArgument
from llmserve.frontends.shared.classification import classified
from llmserve.serving.core import InferenceCore, ServerSettings
from llmserve.serving.types import Tensor
from tests.frontends.http.test_inference_api import Http
from tests.frontends.server import RunningServer, running_server

SCORES = """
    backend: "identity" max_batch_size: 4
    input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }
    output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] label_filename: "labels.txt" }
"""
ENSEMBLE = """
    platform: "ensemble" max_batch_size: 4
    input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
    output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
    ensemble_scheduling { step { model_name: "scores" model_version: -1
        input_map { key: "X" value: "IN" } output_map { key: "Y" value: "OUT" } } }
"""
UNLABELLED = SCORES.replace('label_filename: "labels.txt"', "")
MISSING = SCORES.replace("labels.txt", "no-such-file.txt")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository: Path = tmp_path_factory.mktemp("repository")
    for name, config in {"scores": SCORES, "both": ENSEMBLE, "plain": UNLABELLED, "missing": MISSING}.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
    (repository / "scores/labels.txt").write_text("cat\ndog\nfish\n")
    backends = {"identity": IdentityBackend()}
    with running_server(lambda: InferenceCore(ServerSettings((repository,)), backends)) as running:
        core = running.core
        assert isinstance(core, InferenceCore)
        asyncio.run_coroutine_threadsafe(core.start(), running.loop).result(60)
        yield running
        asyncio.run_coroutine_threadsafe(core.stop(10), running.loop).result(20)


@pytest.fixture(params=[triton_grpc, triton_http], ids=["grpc", "http"])
def ask(request: pytest.FixtureRequest, server: RunningServer) -> Iterator[Any]:
    """The classes of some rows of scores, by tritonclient over one protocol."""
    wire = request.param
    with wire.InferenceServerClient(server.grpc if wire is triton_grpc else server.http) as client:

        def classes(model: str, rows: Any, count: int) -> np.ndarray[Any, Any]:
            given, wanted = ("IN", "OUT") if model == "both" else ("X", "Y")
            data = np.array(rows, dtype=np.float32)
            tensor = wire.InferInput(given, list(data.shape), "FP32")
            tensor.set_data_from_numpy(data)
            output = wire.InferRequestedOutput(wanted, class_count=count)
            return client.infer(model, [tensor], outputs=[output]).as_numpy(wanted)  # type: ignore[no-any-return]

        yield classes


@pytest.mark.parametrize("model", ["scores", "both"])  # an ensemble takes over the labels of its steps
def test_top_classes_with_labels(ask: Any, model: str) -> None:
    rows = [[0.1, 0.9, 0.5, 0.7], [3, 2, 1, 0]]
    answer = ask(model, rows, 2)
    assert answer.tolist() == [[b"0.900000:1:dog", b"0.700000:3"], [b"3.000000:0:cat", b"2.000000:1:dog"]]
    assert ask(model, rows, 9).shape == (2, 4)  # all there are
    assert ask(model, rows, 0).dtype == np.float32  # none: the output as it is


def test_without_labels(ask: Any) -> None:
    assert ask("plain", [[1, 1, 5]], 3).tolist() == [[b"5.000000:2", b"1.000000:0", b"1.000000:1"]]


def test_a_missing_label_file_is_why_a_model_does_not_load(server: RunningServer) -> None:
    row = next(row for row in server.core.repository_index() if row.name == "missing")
    assert row.state == "UNAVAILABLE"
    assert "label_filename of output 'Y' cannot be read" in row.reason


@pytest.mark.parametrize(
    ("dtype", "values", "texts"),
    [
        ("INT64", [2**40, -5], [b"1099511627776:0", b"-5:1"]),
        ("UINT8", [0, 255], [b"255:1", b"0:0"]),
        ("FP64", [1e20, 0.25], [b"100000000000000000000.000000:0", b"0.250000:1"]),
        ("FP32", [np.nan, np.inf], [b"inf:1", b"nan:0"]),
    ],
)
def test_number_types(dtype: str, values: list[Any], texts: list[bytes]) -> None:
    names = {"INT64": np.int64, "UINT8": np.uint8, "FP64": np.float64, "FP32": np.float32}
    answer = classified(Tensor("Y", dtype, np.array(values, names[dtype])), 2, (), batched=False)
    assert (answer.datatype, answer.data.tolist()) == ("BYTES", texts)


def test_empty_outputs_have_no_classes() -> None:
    for shape in [(0, 3), (2, 0), (0,)]:
        answer = classified(Tensor("Y", "FP32", np.zeros(shape, np.float32)), 2, (), batched=True)
        assert answer.data.size == 0


@pytest.mark.parametrize("dtype", ["BYTES", "BOOL", "FP16", "BF16"])
def test_types_that_have_no_order_are_refused(dtype: str) -> None:
    with pytest.raises(InvalidArgument, match=f"output 'Y' due to unsupported type '{dtype}'"):
        classified(Tensor("Y", dtype, np.zeros(1)), 1, (), batched=False)


def test_bad_requests_leave_the_server_well(server: RunningServer) -> None:
    call = Http(server.http_port)
    inputs = [{"name": "X", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]
    for parameters, status, words in [
        ({"classification": -1}, 500, "'classification'"),
        ({"classification": "2"}, 500, "'classification'"),
        ({"classification": True}, 500, "'classification'"),
        ({"classification": 1, "shared_memory_region": "r"}, 400, "can't set both"),
    ]:
        body = {"inputs": inputs, "outputs": [{"name": "Y", "parameters": parameters}]}
        found, text = call.error("POST", "/v2/models/scores/infer", body)
        assert (found, words in text) == (status, True), text
    body = {"inputs": inputs, "outputs": [{"name": "Y", "parameters": {"classification": 2**63}}]}
    assert json.loads(call("POST", "/v2/models/scores/infer", body)[1])["outputs"][0]["shape"] == [1, 2]
    call.connection.close()
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        tensor = triton_grpc.InferInput("X", [1, 2], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 2), np.float32))
        with pytest.raises(InferenceServerException, match="'classification' parameter, expected >= 0"):
            client.infer("scores", [tensor], outputs=[triton_grpc.InferRequestedOutput("Y", class_count=-1)])
