"""The wire over the real server core and Python models: what clients see of validation, streams and failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from llmserve.backends.identity import IdentityBackend
from llmserve.backends.python.backend import PythonBackend
from llmserve.serving.backend import Backend
from llmserve.serving.core import InferenceCore, ServerSettings
from tests.frontends.grpc.test_inference_service import Stream, failure, is_final, typed, values
from tests.frontends.http.test_inference_api import Http
from tests.frontends.server import RunningServer, running_server, wait_until

ADD_TWO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        get = pb_utils.get_input_tensor_by_name
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor(
                "OUTPUT0", get(r, "INPUT0").as_numpy() + get(r, "INPUT1").as_numpy())])
            for r in requests
        ]
"""
ADD_TWO_CONFIG = """
backend: "python" max_batch_size: 4
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 2 ] } input { name: "INPUT1" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 2 ] }
"""
REPEAT = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        for request in requests:
            n = int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy().item())
            sender = request.get_response_sender()
            value = 0
            while value != n and not sender.is_cancelled():
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("VALUE", np.array([[value]], np.int32))]))
                value += 1
                time.sleep(0.001)
            if value == 13:
                error = pb_utils.TritonError("unlucky", pb_utils.TritonError.INTERNAL)
                sender.send(pb_utils.InferenceResponse([], error))
            sender.send(flags=final)
        return None
"""
REPEAT_CONFIG = """
backend: "python" max_batch_size: 8
model_transaction_policy { decoupled: true }
input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "VALUE" data_type: TYPE_INT32 dims: [ 1 ] }
instance_group { count: 4 kind: KIND_CPU }
"""
FAIL = """
class TritonPythonModel:
    def execute(self, requests):
        raise ValueError("boom")
"""
FAIL_CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } output { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }
"""
MODELS = {"add_two": (ADD_TWO_CONFIG, ADD_TWO), "repeat": (REPEAT_CONFIG, REPEAT), "fail": (FAIL_CONFIG, FAIL)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository: Path = tmp_path_factory.mktemp("repository")
    for name, (config, code) in MODELS.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
        (repository / name / "1/model.py").write_text(code)
    backends: dict[str, Backend] = {"python": PythonBackend(), "identity": IdentityBackend()}
    with running_server(lambda: InferenceCore(ServerSettings((repository,)), backends)) as running:
        core = running.core
        assert isinstance(core, InferenceCore)
        asyncio.run_coroutine_threadsafe(core.start(), running.loop).result(60)
        assert core.ready(), core.repository_index()
        yield running
        asyncio.run_coroutine_threadsafe(core.stop(10), running.loop).result(20)


@pytest.fixture
def call(server: RunningServer) -> Iterator[Http]:
    made = Http(server.http_port)
    yield made
    made.connection.close()


@pytest.fixture
def stub(server: RunningServer) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    with grpc.insecure_channel(server.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def fp32(name: str, *rows: Sequence[float]) -> dict[str, Any]:
    return {"name": name, "datatype": "FP32", "shape": [len(rows), len(rows[0])], "data": [list(row) for row in rows]}


GOOD = [fp32("INPUT0", [1, 2]), fp32("INPUT1", [10, 20])]


def grpc_request(body: dict[str, Any]) -> service_pb2.ModelInferRequest:
    """The same request as a message."""
    request = service_pb2.ModelInferRequest(model_name="add_two", id=body.get("id", ""))
    for entry in body["inputs"]:
        flat = [value for row in entry["data"] for value in (row if isinstance(row, list) else [row])]
        contents = {"int_contents" if entry["datatype"] == "INT32" else "fp32_contents": flat}
        request.inputs.append(typed(entry["name"], entry["datatype"], entry["shape"], **contents))
    for entry in body.get("outputs", ()):
        request.outputs.add(name=entry["name"])
    return request


def test_infer_over_both_protocols(call: Http, stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    _, answer = call("POST", "/v2/models/add_two/infer", {"inputs": GOOD, "id": "x"})
    assert json.loads(answer)["outputs"] == [
        {"name": "OUTPUT0", "datatype": "FP32", "shape": [1, 2], "data": [11.0, 22.0]}
    ]
    reply = stub.ModelInfer(grpc_request({"inputs": GOOD, "id": "x"}))
    assert (reply.id, reply.model_version, len(reply.raw_output_contents[0])) == ("x", "1", 8)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            {"inputs": [GOOD[0], fp32("INPUT1", [1, 2]) | {"datatype": "INT32"}]},
            "inference input 'INPUT1' data-type is 'INT32', but model 'add_two' expects 'FP32'",
        ),
        (
            {"inputs": [GOOD[0], fp32("INPUT1", [1, 2, 3])]},
            "unexpected shape for input 'INPUT1' for model 'add_two'. Expected [-1,2], got [1,3].",
        ),
        (
            {"inputs": [fp32("INPUT0", *[[1, 2]] * 5), fp32("INPUT1", *[[1, 2]] * 5)]},
            "inference request batch-size must be <= 4 for 'add_two'",
        ),
        (
            {"inputs": [GOOD[0], fp32("INPUT1", [1, 2], [3, 4])]},
            "batch size does not match other inputs for 'add_two'",
        ),
        (
            {"inputs": [GOOD[0]]},
            "expected 2 inputs but got 1 inputs for model 'add_two'. Got input(s) ['INPUT0'], but missing required "
            "input(s) ['INPUT1']. Please provide all required input(s).",
        ),
        ({"inputs": [*GOOD, fp32("MORE", [1, 2])]}, "expected 2 inputs but got 3 inputs for model 'add_two'"),
        (
            {"inputs": [GOOD[0], fp32("WRONG", [1, 2])]},
            "unexpected inference input 'WRONG' for model 'add_two'",
        ),
        (
            {"inputs": GOOD, "outputs": [{"name": "NOPE"}]},
            "unexpected inference output 'NOPE' for model 'add_two'",
        ),
    ],
)
def test_the_core_s_checks_reach_both_protocols(
    call: Http, stub: service_pb2_grpc.GRPCInferenceServiceStub, body: dict[str, Any], words: str
) -> None:
    status, text = call.error("POST", "/v2/models/add_two/infer", body | {"id": "r7"})
    assert (status, words in text) == (400, True), text
    assert text.startswith("[request id: r7] ")
    code, details = failure(lambda: stub.ModelInfer(grpc_request(body)))
    assert (code, words in details) == (grpc.StatusCode.INVALID_ARGUMENT, True), details
    stream = Stream(stub)
    stream.send(grpc_request(body | {"id": "bad"}), grpc_request({"inputs": GOOD, "id": "good"}))
    responses = {each.infer_response.id: each for each in stream.half_close()}
    assert words in responses["bad"].error_message
    assert len(responses["good"].infer_response.raw_output_contents) == 1


def test_a_model_that_raises(call: Http, stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    body = {"inputs": [{"name": "X", "datatype": "INT32", "shape": [1], "data": [1]}]}
    status, text = call.error("POST", "/v2/models/fail/infer", body)
    assert (status, "ValueError: boom" in text) == (500, True), text
    request = service_pb2.ModelInferRequest(
        model_name="fail", inputs=[typed("X", "INT32", [1], int_contents=[1])], id="f"
    )
    code, details = failure(lambda: stub.ModelInfer(request))
    assert (code, "ValueError: boom" in details) == (grpc.StatusCode.INTERNAL, True)
    stream = Stream(stub)
    stream.send(request)
    (response,) = stream.half_close()
    assert "ValueError: boom" in response.error_message
    assert (response.infer_response.id, response.infer_response.model_name) == ("f", "fail")


def repeat_request(n: int, request_id: str = "") -> service_pb2.ModelInferRequest:
    inputs = [typed("N", "INT32", [1, 1], int_contents=[n])]
    return service_pb2.ModelInferRequest(model_name="repeat", id=request_id, inputs=inputs)


def test_decoupled_streams_side_by_side(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    stream = Stream(stub)
    stream.send(*(repeat_request(20 + index, f"r{index}") for index in range(8)))
    responses = stream.half_close()
    for index in range(8):
        assert values(responses, f"r{index}") == list(range(20 + index))
    assert not any(is_final(response) for response in responses)


def test_an_error_in_the_middle_of_a_decoupled_request(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    stream = Stream(stub)
    stream.send(repeat_request(13, "a"))
    responses = stream.half_close()
    assert values(responses, "a") == list(range(13))
    assert responses[-1].error_message == "unlucky"


def test_events_of_a_decoupled_model(call: Http) -> None:
    status, body = call("POST", "/v2/models/repeat/generate_stream", {"N": 3})
    assert status == 200
    events = [json.loads(line.removeprefix("data: ")) for line in body.decode().split("\n\n") if line]
    assert [event["VALUE"] for event in events] == [0, 1, 2]


def test_a_cancelled_stream_ends_in_the_model(
    server: RunningServer, call: Http, stub: service_pb2_grpc.GRPCInferenceServiceStub
) -> None:
    stream = Stream(stub)
    stream.send(*[repeat_request(-1)] * 4)  # takes every instance
    next(stream.call)
    stream.call.cancel()
    with ThreadPoolExecutor() as pool:
        assert pool.submit(call, "POST", "/v2/models/repeat/generate", {"N": 1}).result(timeout=20)[0] == 200
    wait_until(lambda: canceled(server) >= 1)


def canceled(server: RunningServer) -> int:
    wanted = ("nv_inference_request_failure{", 'model="repeat"', 'reason="CANCELED"')
    lines = server.core.metrics_text().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if all(part in line for part in wanted))


def test_metrics_over_http(server: RunningServer) -> None:
    call = Http(server.metrics_port)
    assert b'nv_inference_request_success{model="add_two",version="1"}' in call("GET", "/metrics")[1]
    call.connection.close()


def test_config_and_metadata_over_http(call: Http) -> None:
    config = json.loads(call("GET", "/v2/models/repeat/config")[1])
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["instance_group"][0]["kind"] == "KIND_CPU"
    metadata = json.loads(call("GET", "/v2/models/add_two")[1])
    assert metadata["inputs"][0] == {"name": "INPUT0", "datatype": "FP32", "shape": [-1, 2]}
    assert (metadata["versions"], metadata["platform"]) == (["1"], "python")
    assert call("GET", "/v2/models/add_two/ready") == (200, b"")
    assert call.error("GET", "/v2/models/add_two/versions/3")[0] == 404
