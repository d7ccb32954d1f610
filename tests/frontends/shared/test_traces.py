"""Traces of requests: what the files say of requests over either protocol, of streams and of ensembles."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from llmserve.backends.identity import IdentityBackend
from llmserve.backends.python.backend import PythonBackend
from llmserve.cli.tracing import make_tracer
from llmserve.errors import InvalidArgument
from llmserve.frontends.shared.trace_settings import TraceSettings
from llmserve.frontends.shared.tracer import Tracer
from llmserve.serving.backend import Backend
from llmserve.serving.core import InferenceCore, ServerSettings
from llmserve.serving.types import Tensor
from tests.frontends.http.test_inference_api import Http
from tests.frontends.server import RunningServer, running_server, wait_until
from tests.frontends.stub_core import StubCore

MODEL = """
    backend: "identity"
    input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
    parameters { key: "execute_delay_ms" value { string_value: "20" } }
"""
ENSEMBLE = """
    platform: "ensemble"
    input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
    ensemble_scheduling {
        step { model_name: "one" model_version: -1
            input_map { key: "X" value: "IN" } output_map { key: "Y" value: "MIDDLE" } }
        step { model_name: "one" model_version: -1
            input_map { key: "X" value: "MIDDLE" } output_map { key: "Y" value: "OUT" } } }
"""
ASKS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        def ask(request):
            asked = pb_utils.InferenceRequest(
                model_name="one", requested_output_names=["Y"], trace=request.trace(),
                inputs=[pb_utils.get_input_tensor_by_name(request, "X")])
            return pb_utils.InferenceResponse(asked.exec().output_tensors())
        return [ask(request) for request in requests]
"""
PHASES = [
    "REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END",
    "REQUEST_END",
]  # fmt: skip


@pytest.fixture(scope="module")
def traces_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces") / "trace.json"


@pytest.fixture(scope="module")
def server(traces_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository: Path = tmp_path_factory.mktemp("repository")
    for name, config in {"one": MODEL, "two": ENSEMBLE}.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
    for name, mode in {"asks": "thread", "asks_apart": "process"}.items():
        (repository / name / "1").mkdir(parents=True)
        parameter = f'parameters {{ key: "EXECUTION_MODE" value {{ string_value: "{mode}" }} }}'
        (repository / name / "config.pbtxt").write_text(MODEL.replace('"identity"', '"python"') + parameter)
        (repository / name / "1/model.py").write_text(ASKS)
    tracer = Tracer(str(traces_file), TraceSettings(rate=1))
    backends: dict[str, Backend] = {"identity": IdentityBackend(), "python": PythonBackend()}
    with running_server(lambda: InferenceCore(ServerSettings((repository,)), backends), tracer=tracer) as running:
        core = running.core
        assert isinstance(core, InferenceCore)
        asyncio.run_coroutine_threadsafe(core.start(), running.loop).result(60)
        yield running
        asyncio.run_coroutine_threadsafe(core.stop(10), running.loop).result(20)


@pytest.fixture
def call(server: RunningServer) -> Iterator[Http]:
    made = Http(server.http_port)
    yield made
    made("POST", "/v2/trace/setting", {"trace_level": None, "trace_count": None, "log_frequency": None})
    made.connection.close()


def request(name: str) -> dict[str, Any]:
    return {"id": "r1", "inputs": [{"name": name, "datatype": "FP32", "shape": [2], "data": [1.5, 3e6]}]}


class Traces:
    """One file, by trace."""

    def __init__(self, path: Path) -> None:
        self.heads: dict[int, dict[str, Any]] = {}
        self.times: dict[int, list[tuple[str, int]]] = defaultdict(list)
        self.tensors: dict[int, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
        for record in json.loads(path.read_text()):
            if "timestamps" in record:
                self.times[record["id"]] += [(stamp["name"], stamp["ns"]) for stamp in record["timestamps"]]
            elif "activity" in record:
                self.tensors[record["id"]].append((record["activity"], record["tensor"]))
            else:
                self.heads[record["id"]] = record

    def names(self, trace_id: int) -> list[str]:
        return [name for name, _ in sorted(self.times[trace_id], key=lambda stamp: stamp[1])]


def fresh(path: Path) -> Path:
    for old in path.parent.iterdir():
        old.unlink()
    return path


def written(path: Path, num_requests: int) -> Traces:
    """When as many requests as were sent are in the file."""
    wait_until(lambda: path.exists() and path.read_bytes().count(b"_SEND_END") >= num_requests)
    return Traces(path)


def test_timestamps_over_both_protocols(server: RunningServer, call: Http, traces_file: Path) -> None:
    path = fresh(traces_file)
    assert call("POST", "/v2/trace/setting", {"trace_level": ["TIMESTAMPS"]})[0] == 200
    assert call("POST", "/v2/models/one/infer", request("X"))[0] == 200
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        tensor = triton_grpc.InferInput("X", [1], "FP32")
        tensor.set_data_from_numpy(np.ones(1, np.float32))
        client.infer("one", [tensor])
    traces = written(path, 2)
    (first, head), (second, _) = sorted(traces.heads.items())
    assert head == {"id": first, "model_name": "one", "model_version": 1, "request_id": "r1"}
    http = [name for name in traces.names(first) if not name.startswith("INFER")]
    assert http[:2] + http[-2:] == ["HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END"]
    assert http[2:-2] == PHASES
    rpc = [name for name in traces.names(second) if not name.startswith("INFER")]
    assert set(rpc) == {*PHASES, "GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END"}
    times = dict(traces.times[first])
    assert times["COMPUTE_OUTPUT_START"] - times["COMPUTE_INPUT_END"] >= 20e6  # the model's delay
    assert "INFER_RESPONSE_COMPLETE" in times


def test_an_id_in_the_headers_names_what_has_none_of_its_own(call: Http, traces_file: Path) -> None:
    path = fresh(traces_file)
    assert call("POST", "/v2/trace/setting", {"trace_level": ["TIMESTAMPS"]})[0] == 200
    headers = {"x-request-id": "of-the-header"}
    for own in ({}, {"id": "of-the-body"}):
        body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1.0]}], **own}
        status, answer = call("POST", "/v2/models/two/infer", body, headers)
        assert (status, json.loads(answer).get("id")) == (200, own.get("id"))  # which is as ever
    ids = [head["request_id"] for _, head in sorted(written(path, 2).heads.items())]
    assert ids == ["of-the-header"] * 3 + ["of-the-body"] * 3  # an ensemble and its two steps


def test_the_steps_of_an_ensemble_are_its_children(call: Http, traces_file: Path) -> None:
    path = fresh(traces_file)
    call("POST", "/v2/models/two/trace/setting", {"trace_level": ["TIMESTAMPS", "TENSORS"]})
    assert call("POST", "/v2/models/two/infer", request("IN"))[0] == 200
    assert call("POST", "/v2/models/one/infer", request("X"))[0] == 200  # not traced: the setting is the ensemble's
    call("POST", "/v2/models/two/trace/setting", {"trace_level": None})
    traces = written(path, 1)
    (parent,) = [head for head in traces.heads.values() if "parent_id" not in head]
    children = [head for head in traces.heads.values() if "parent_id" in head]
    assert [parent["model_name"], *(child["model_name"] for child in children)] == ["two", "one", "one"]
    assert {child["parent_id"] for child in children} == {parent["id"]}
    assert "COMPUTE_START" not in traces.names(parent["id"])  # the steps compute
    assert traces.names(children[0]["id"]) == PHASES
    whole, steps = dict(traces.times[parent["id"]]), [dict(traces.times[child["id"]]) for child in children]
    assert whole["REQUEST_START"] <= steps[0]["REQUEST_START"] < steps[0]["REQUEST_END"] <= steps[1]["REQUEST_START"]
    assert steps[1]["REQUEST_END"] <= whole["REQUEST_END"]
    assert traces.tensors[parent["id"]] == [
        ("TENSOR_QUEUE_INPUT", {"name": "IN", "data": "1.5,3e+06", "shape": "2", "dtype": "FP32"}),
        ("TENSOR_BACKEND_OUTPUT", {"name": "OUT", "data": "1.5,3e+06", "shape": "2", "dtype": "FP32"}),
    ]


@pytest.mark.parametrize(("model", "num_children"), [("asks", 1), ("asks_apart", 0)])
def test_requests_that_a_model_makes(call: Http, traces_file: Path, model: str, num_children: int) -> None:
    """A model in a process of its own gets its requests without their traces."""
    path = fresh(traces_file)
    call("POST", f"/v2/models/{model}/trace/setting", {"trace_level": ["TIMESTAMPS"]})
    assert call("POST", f"/v2/models/{model}/infer", request("X"))[0] == 200
    call("POST", f"/v2/models/{model}/trace/setting", {"trace_level": None})
    heads = written(path, 1).heads
    (parent,) = [head["id"] for head in heads.values() if head["model_name"] == model]
    assert [head.get("parent_id") for head in heads.values() if head["id"] != parent] == [parent] * num_children


def test_rate_count_and_files(call: Http, traces_file: Path) -> None:
    fresh(traces_file)
    update = {"trace_level": ["TIMESTAMPS"], "trace_rate": "2", "trace_count": "3", "log_frequency": "2"}
    call("POST", "/v2/trace/setting", update)
    for _ in range(9):
        call("POST", "/v2/models/one/infer", request("X"))
    assert json.loads(call("GET", "/v2/trace/setting")[1])["trace_count"] == "0"
    call("POST", "/v2/trace/setting", {"trace_rate": None})
    wait_until(lambda: len(list(traces_file.parent.iterdir())) == 2)
    files = sorted(traces_file.parent.iterdir())
    wait_until(lambda: files[1].read_bytes().endswith(b"]"))
    assert [len(Traces(file).heads) for file in files] == [2, 1]
    assert [file.suffix for file in files] == [f".{int(files[0].suffix[1:]) + step}" for step in (0, 1)]


def test_requests_that_fail_are_traced(call: Http, traces_file: Path) -> None:
    path = fresh(traces_file)
    call("POST", "/v2/trace/setting", {"trace_level": ["TIMESTAMPS"]})
    assert call("POST", "/v2/models/one/infer", {"inputs": []})[0] == 400
    assert call("POST", "/v2/models/nope/infer", b"xx")[0] == 404
    traces = written(path, 2)
    assert traces.heads == {}
    assert sorted(map(traces.names, traces.times)) == [
        ["HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END"],
        ["HTTP_SEND_START", "HTTP_SEND_END"],
    ]


def test_streams_stamp_every_response(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with running_server(StubCore, tracer=Tracer(str(path), TraceSettings(("TIMESTAMPS",), rate=1))) as server:
        with triton_grpc.InferenceServerClient(server.grpc) as client:
            client.start_stream(callback=lambda result, error: None)
            tensor = triton_grpc.InferInput("N", [1, 1], "INT32")
            tensor.set_data_from_numpy(np.full((1, 1), 3, np.int32))
            client.async_stream_infer("count", [tensor])
            client.stop_stream()
        call = Http(server.http_port)
        assert call("POST", "/v2/models/count/generate_stream", {"N": 2})[1].count(b"data: ") == 2
        call.connection.close()
    traces = Traces(path)
    counts = [[traces.names(each).count(name) for name in ("GRPC_SEND_END", "HTTP_SEND_END")] for each in traces.times]
    assert counts == [[3, 0], [0, 1]]


def test_a_directory_that_cannot_be_written_loses_traces_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracer = Tracer(str(tmp_path / "no-such-directory/trace.json"), TraceSettings(("TIMESTAMPS",), rate=1))
    for _ in range(2):
        trace = tracer.sample("m")
        assert trace is not None
        trace.stamp("X")
        tracer.finish("m", trace)
    tracer.close()
    assert caplog.text.count("cannot write traces") == 1


# As a limit of the size of files, which is lifted again. Traces of two lengths: the first fits.
FULL_DISK = """
import resource, signal, sys
from llmserve.frontends.shared.tracer import _TraceFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file, most = _TraceFile(sys.argv[1]), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), most[1]))
for number in (1, 2, 3):
    file.append([{"id": number, "model_name": "m" * 10_000 * (number == 2)}], 0)
resource.setrlimit(resource.RLIMIT_FSIZE, most)
file.append([{"id": 4}], 0)
"""


@pytest.mark.parametrize(("room", "kept"), [(4096, [1, 3, 4]), (1, [4])])
def test_a_full_disk_loses_traces_and_not_the_file(tmp_path: Path, room: int, kept: list[int]) -> None:
    path = tmp_path / "trace.json"
    done = subprocess.run([sys.executable, "-c", FULL_DISK, path, str(room)], capture_output=True, text=True)
    assert "cannot write traces" in done.stderr
    assert [record["id"] for record in json.loads(path.read_text())] == kept


def test_the_flag(tmp_path: Path) -> None:
    file = str(tmp_path / "t.json")
    options = [
        f"triton,file={file}",
        "level=TIMESTAMPS",
        "level=TENSORS",
        "rate=5",
        "count=7",
        "triton,log-frequency=2",
    ]
    tracer = make_tracer([*options, "mode=triton"])
    assert tracer.describe() == {
        "trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "5", "trace_count": "7", "log_frequency": "2",
        "trace_file": file, "trace_mode": "triton",
    }  # fmt: skip
    tracer.close()
    with pytest.raises(InvalidArgument) as caught:
        make_tracer(["nonsense", "opentelemetry,url=x", "mode=zipkin", "rate=x", "file=/no/such/place/t.json"])
    for words in (
        "nonsense: known:",
        "this needs mode=opentelemetry",
        "mode=zipkin: the modes are triton and opentelemetry",
        "'trace_rate', got: x",
        "no directory /no/such/place",
    ):
        assert words in str(caught.value)
    with pytest.raises(InvalidArgument, match="trace file name is not given"):
        make_tracer(["level=TIMESTAMPS"])


def test_clients_see_the_file(server: RunningServer, call: Http, traces_file: Path) -> None:
    with triton_http.InferenceServerClient(server.http) as client:
        assert client.get_trace_settings()["trace_file"] == str(traces_file)


def test_texts_of_tensors_are_made_by_the_thread_that_writes_them(tmp_path: Path) -> None:
    """That of a large tensor takes seconds, which the event loop does not have."""
    threads: list[str] = []

    class Element:
        def __int__(self) -> int:
            threads.append(threading.current_thread().name)
            return 7

    tracer = Tracer(str(tmp_path / "trace.json"), TraceSettings(("TENSORS",), rate=1))
    trace = tracer.sample("m")
    assert trace is not None
    data = np.full((2, 5000), Element(), dtype=object)
    trace.response([Tensor("Y", "INT32", data)])
    tracer.finish("m", trace)
    tracer.close()
    (record,) = json.loads((tmp_path / "trace.json").read_text())
    assert record["tensor"] == {"name": "Y", "data": ",".join(["7"] * 10_000), "shape": "2,5000", "dtype": "INT32"}
    assert set(threads) == {"trace-writer_0"}
