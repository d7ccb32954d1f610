"""Extensions over both protocols: log and trace settings, shared memory, classes with labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import shared_memory
from typing import Any

import numpy as np
from tritonclient.grpc.service_pb2 import (
    InferParameter,
    LogSettingsRequest,
    ModelInferRequest,
    ModelRepositoryParameter,
    TraceSettingRequest,
)

from tests.compat.observe import Case, Json, get, grpc_call, http_call, infer_message, post, raw_input, rpc
from tools.servers import Endpoint

ROWS = [[0.1, 0.9, 0.5, 0.7], [3, 2, 1, 0]]
SCORES = "/v2/models/scores/infer"
SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
REGION_BYTES = 4096
NO_UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"


def scores(gist: str = "", **parameters: Any) -> Case:
    tensor = {"name": "X", "datatype": "FP32", "shape": [2, 4], "data": ROWS}
    return Case(post(SCORES, {"inputs": [tensor], "outputs": [{"name": "SCORES", "parameters": parameters}]}), gist)


def scores_by_rpc(**parameters: InferParameter) -> Case:
    wanted = [ModelInferRequest.InferRequestedOutputTensor(name="SCORES", parameters=parameters)]
    raw = np.array(ROWS, dtype=np.float32).tobytes()
    request = infer_message("scores", [raw_input("X", "FP32", [2, 4])], raw_input_contents=[raw], outputs=wanted)
    gist = "invalid value type for 'classification' parameter, expected int64_param"
    return Case(lambda endpoint: grpc_call(endpoint, "ModelInfer", request), gist)


def in_turn(*steps: Callable[[Endpoint], Json]) -> Case:
    return Case(lambda endpoint: [step(endpoint) for step in steps])


@contextmanager
def region(endpoint: Endpoint) -> Iterator[Any]:
    """An object of shared memory with 1, 2 at its start, registered as `r`."""
    memory = shared_memory.SharedMemory(create=True, size=REGION_BYTES)
    try:
        assert memory.buf is not None
        memory.buf[:8] = np.array([1, 2], dtype=np.float32).tobytes()
        http_call(endpoint, "POST", f"{SYSTEM}/region/r/register", {"key": memory.name, "byte_size": REGION_BYTES})
        yield memory.buf
    finally:
        http_call(endpoint, "POST", f"{SYSTEM}/region/r/unregister")
        memory.close()
        memory.unlink()


def place(name: str = "r", size: Any = 8, **more: Any) -> dict[str, Any]:
    return {"shared_memory_region": name, "shared_memory_byte_size": size, **more}


def shared(given: Mapping[str, Any], wanted: Mapping[str, Any] | None = None) -> Case:
    """A request whose input is there, and whose output shall go there; what has been written."""
    body: dict[str, Any] = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 2], "parameters": given}]}
    if wanted is not None:
        body["outputs"] = [{"name": "SCORES", "parameters": wanted}]

    def run(endpoint: Endpoint) -> Json:
        with region(endpoint) as buffer:
            answer = http_call(endpoint, "POST", SCORES, body)
            return {"answer": answer, "written": bytes(buffer[64:80]).hex()}

    return Case(run, "Invalid offset + byte size for shared memory region: 'r'")


def shared_by_rpc(given: Mapping[str, Any], wanted: Mapping[str, Any] | None = None) -> Case:
    kinds = {str: "string_param", int: "int64_param", bool: "bool_param"}

    def parameters(values: Mapping[str, Any]) -> dict[str, InferParameter]:
        return {name: InferParameter(**{kinds[type(value)]: value}) for name, value in values.items()}

    tensor = raw_input("X", "FP32", [1, 2])
    for name, value in parameters(given).items():
        tensor.parameters[name].CopyFrom(value)
    outputs = [] if wanted is None else [{"name": "SCORES", "parameters": parameters(wanted)}]
    request = ModelInferRequest(model_name="scores", inputs=[tensor], outputs=outputs)

    def run(endpoint: Endpoint) -> Json:
        with region(endpoint) as buffer:
            return {"answer": grpc_call(endpoint, "ModelInfer", request), "written": bytes(buffer[64:80]).hex()}

    return Case(run, "Invalid offset + byte size for shared memory region: 'r'")


def log(name: str, **value: Any) -> Case:
    setting = LogSettingsRequest.SettingValue(**value)
    return Case(rpc("LogSettings", settings={name: setting}), "invalid argument for log_format, got: x")


def trace(name: str, *values: str, model: str = "") -> Case:
    setting = TraceSettingRequest.SettingValue(value=values)
    return Case(rpc("TraceSetting", settings={name: setting}, model_name=model))


SETTINGS = {
    "log settings": Case(get("/v2/logging")),
    "log settings change": in_turn(
        post("/v2/logging", {"log_verbose_level": 1, "log_info": False, "log_format": "ISO8601"}),
        rpc("LogSettings"),
        post("/v2/logging", {"log_verbose_level": 0, "log_info": True, "log_format": "default"}),
    ),
    "an unknown log setting": Case(post("/v2/logging", {"nope": 1})),
    "a log flag of text": Case(post("/v2/logging", {"log_info": "x"}), "attempt to access JSON non-boolean as boolean"),
    "a log level of text": Case(
        post("/v2/logging", {"log_verbose_level": "1"}),
        NO_UNSIGNED,
    ),
    "a log file": Case(post("/v2/logging", {"log_file": "/x"})),
    "a log level of text by RPC": log("log_verbose_level", string_param="1"),
    "a log flag of an integer by RPC": log("log_info", uint32_param=1),
    "an unknown log format by RPC": log("log_format", string_param="x"),
    "a log file by RPC": log("log_file", string_param="x"),
    "trace settings": Case(get("/v2/trace/setting")),
    "trace settings of a model": Case(get("/v2/models/add_sub/trace/setting")),
    "trace settings of an unknown model": Case(get("/v2/models/nope/trace/setting")),
    "trace settings of an unknown model by RPC": Case(rpc("TraceSetting", model_name="nope")),
    "trace settings change": in_turn(
        post("/v2/trace/setting", {"trace_rate": "5", "log_frequency": "3"}),
        post("/v2/models/add_sub/trace/setting", {"trace_count": "7"}),
        get("/v2/trace/setting"),
        post("/v2/trace/setting", {"trace_rate": "6"}),
        rpc("TraceSetting", model_name="add_sub"),
        post("/v2/models/add_sub/trace/setting", {"trace_count": None}),
        post("/v2/trace/setting", {"trace_rate": None, "log_frequency": None}),
    ),
    "a trace level without a file": Case(
        post("/v2/trace/setting", {"trace_level": ["TIMESTAMPS"]}),
        "trace file name is not given",
    ),
    "a trace rate of text": Case(post("/v2/trace/setting", {"trace_rate": "x"})),
    "a trace rate that is a number": Case(
        post("/v2/trace/setting", {"trace_rate": 5}), "attempt to access JSON non-string as string"
    ),
    "a trace rate that is too large": Case(post("/v2/trace/setting", {"trace_rate": "99999999999999"})),
    "a trace count below -1": Case(post("/v2/trace/setting", {"trace_count": "-2"}), "Expecting value >= -1, got:"),
    "two trace levels of which one is OFF": Case(post("/v2/trace/setting", {"trace_level": ["OFF", "TENSORS"]})),
    "an unknown trace setting": Case(post("/v2/trace/setting", {"nope": "1"})),
    "a trace file": Case(post("/v2/trace/setting", {"trace_file": "/x"})),
    "a trace file by RPC": trace("trace_file", "x"),
    "two trace rates by RPC": trace("trace_rate", "5", "6"),
    "a trace rate of text by RPC": trace("trace_rate", "x"),
}
CLASSES = {
    "classes": scores(classification=2),
    "classes in binary": scores(classification=1, binary_data=True),
    "more classes than there are": scores(classification=9),
    "no classes": scores(classification=0),
    "a negative number of classes": scores(NO_UNSIGNED, classification=-1),
    "classes of text": scores(NO_UNSIGNED, classification="2"),
    "classes by RPC": scores_by_rpc(classification=InferParameter(int64_param=2)),
    "classes of text by RPC": scores_by_rpc(classification=InferParameter(string_param="2")),
    "a negative number of classes by RPC": scores_by_rpc(classification=InferParameter(int64_param=-1)),
}
MEMORY = {
    "no regions": Case(get(f"{SYSTEM}/status")),
    "an unknown region": Case(get(f"{SYSTEM}/region/nope/status")),
    "an unknown region by RPC": Case(rpc("SystemSharedMemoryStatus", name="nope")),
    "unregister an unknown region": Case(post(f"{SYSTEM}/region/nope/unregister", b"")),
    "register without a key": Case(post(f"{SYSTEM}/region/r/register", {"byte_size": 4})),
    "register without a size": Case(post(f"{SYSTEM}/region/r/register", {"key": "x"})),
    "register an object that is not there": Case(post(f"{SYSTEM}/region/r/register", {"key": "/nope", "byte_size": 4})),
    "register an object that is not there by RPC": Case(
        rpc("SystemSharedMemoryRegister", name="r", key="/nope", byte_size=4)
    ),
    "a tensor from shared memory": shared(place()),
    "a tensor to shared memory": shared(place(), place(shared_memory_offset=64)),
    "a place that is too small": shared(place(), place(size=4)),
    "a place outside of its region": shared(place(), place(shared_memory_offset=4092)),
    "an unknown place": shared(place(), place("nope")),
    "a tensor outside of its region": shared(place(shared_memory_offset=4092)),
    "a tensor in an unknown region": shared(place("nope")),
    "a tensor of another size": shared(place(size=16)),
    "a place and binary data": shared(place(), place(binary_data=True)),
    "a place and classes": shared(place(), place(classification=1)),
    "a tensor from shared memory by RPC": shared_by_rpc(place()),
    "a tensor to shared memory by RPC": shared_by_rpc(place(), place(shared_memory_offset=64)),
    "a place that is too small by RPC": shared_by_rpc(place(), place(size=4)),
    "an unknown place by RPC": shared_by_rpc(place(), place("nope")),
    "a tensor in an unknown region by RPC": shared_by_rpc(place("nope")),
    "a negative offset by RPC": shared_by_rpc(place(shared_memory_offset=-4)),
    "a region without a size by RPC": shared_by_rpc({"shared_memory_region": "r"}),
    "a region that is a number by RPC": shared_by_rpc(place(5)),  # type: ignore[arg-type]  # on purpose
    "a size of text by RPC": shared_by_rpc(place(size="8")),
    "a place and classes by RPC": shared_by_rpc(place(), place(classification=1)),
    "no regions on a GPU": Case(get(f"{CUDA}/status")),
    "an unknown region on a GPU": Case(get(f"{CUDA}/region/nope/status")),
    "unregister an unknown region on a GPU": Case(post(f"{CUDA}/region/nope/unregister", b"")),
}
CONTROL = {
    "load with a repository's name": Case(post("/v2/repository/r/models/add_sub/load", b"")),
    "unload with a repository's name": Case(post("/v2/repository/r/models/add_sub/unload", b"")),
    "index with a repository's name": Case(rpc("RepositoryIndex", repository_name="r")),
    "load with an unknown parameter": Case(
        rpc("RepositoryModelLoad", model_name="one", parameters={"foo": ModelRepositoryParameter(bool_param=True)}),
        "unrecognized load parameter 'foo'.",
    ),
    "load with a config of bytes": Case(
        rpc("RepositoryModelLoad", model_name="one", parameters={"config": ModelRepositoryParameter(bytes_param=b"{}")})
    ),
    "load with a file of text": Case(
        rpc("RepositoryModelLoad", model_name="one", parameters={"file:1/x": ModelRepositoryParameter(string_param="")})
    ),
    "unload with a flag of text": Case(
        rpc(
            "RepositoryModelUnload",
            model_name="one",
            parameters={"unload_dependents": ModelRepositoryParameter(string_param="x")},
        )
    ),
    "load that is not JSON": Case(
        post("/v2/repository/models/one/load", b"xx"), "failed to parse the request JSON buffer: "
    ),
}
CASES = SETTINGS | CLASSES | MEMORY | CONTROL
