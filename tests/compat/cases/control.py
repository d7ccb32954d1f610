"""Explicit model control, step by step on a copy of the repository: each step builds on those before it."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tritonclient.grpc.service_pb2 import ModelRepositoryParameter

from tests.compat.cases import grpc, http
from tests.compat.observe import Case, Json, get, http_call, post, rpc
from tools.servers import Endpoint

FLAGS = ("--model-control-mode=explicit", "--load-model=add_sub")
UNLOAD_TIMEOUT_S = 10
LOAD, UNLOAD = "/v2/repository/models/{}/load", "/v2/repository/models/{}/unload"
OVERRIDE = {"backend": "python", "max_batch_size": 8} | {
    kind: [{"name": name, "data_type": "TYPE_FP32", "dims": [4]} for name in names]
    for kind, names in (("input", ("INPUT0", "INPUT1")), ("output", ("SUM", "DIFFERENCE")))
}
NEW = {"backend": "python"} | {
    kind: [{"name": name, "data_type": "TYPE_INT32", "dims": [1]}] for kind, name in (("input", "X"), ("output", "Y"))
}
CODE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", 3 * r.inputs()[0].as_numpy())]) for r in requests]
"""


def load(model: str, **parameters: Any) -> Case:
    return Case(post(LOAD.format(model), {"parameters": parameters} if parameters else {}))


def unload(model: str, **parameters: Any) -> Case:
    """And wait until nothing of it is on its way out."""

    def run(endpoint: Endpoint) -> Json:
        answer = http_call(endpoint, "POST", UNLOAD.format(model), {"parameters": parameters} if parameters else {})
        deadline = time.monotonic() + UNLOAD_TIMEOUT_S
        unwatched = replace(endpoint, exchanges=None)
        while "UNLOADING" in str(index(unwatched)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return answer

    return Case(run)


def index(endpoint: Endpoint) -> Json:
    """The models that have ever been loaded."""
    rows = http_call(endpoint, "POST", "/v2/repository/index", b"")["body"]
    return [row for row in rows if row.get("state")]


def infer(model: str, value: int) -> Callable[[Endpoint], Json]:
    tensor = {"name": "X", "datatype": "INT32", "shape": [1], "data": [value]}
    return post(f"/v2/models/{model}/infer", {"inputs": [tensor]})


def batch_size(endpoint: Endpoint) -> Json:
    return http_call(endpoint, "GET", "/v2/models/add_sub/config")["body"]["max_batch_size"]


def load_by_rpc(gist: str = "", **parameters: ModelRepositoryParameter) -> Case:
    return Case(rpc("RepositoryModelLoad", model_name="twice", parameters=parameters), gist)


def break_model(endpoint: Endpoint) -> Json:
    (endpoint.repository / "twice/1/model.py").write_text("raise RuntimeError('no luck')\n")


def repair_model(endpoint: Endpoint) -> Json:
    (endpoint.repository / "twice/1/model.py").write_text(CODE)


def known_names(endpoint: Endpoint) -> Json:
    return sorted({row["name"] for row in http_call(endpoint, "POST", "/v2/repository/index", b"")["body"]})


NOT_LOADED = "failed to load 'nope'"
CASES: Mapping[str, Case] = {
    "what is loaded at start": Case(index),
    "the index knows every model": Case(known_names),
    "ready": Case(get("/v2/health/ready")),
    "a model that is not loaded": Case(infer("twice", 2)),
    "load": load("twice"),
    "it answers": Case(infer("twice", 2)),
    "load again": load("twice"),
    "an unknown model": Case(post(LOAD.format("nope"), {}), gist=NOT_LOADED),
    "an unknown model over gRPC": Case(rpc("RepositoryModelLoad", model_name="nope"), gist=NOT_LOADED),
    "an unknown model is unloaded": unload("nope"),
    "the server is ready all the same": Case(get("/v2/health/ready")),
    "an ensemble loads its steps": load("ensemble"),
    "and answers": http.INFER["an ensemble"],
    "what is loaded now": Case(index),
    "unload": unload("twice"),
    "the unloaded model": Case(infer("twice", 2)),
    "its readiness": Case(get("/v2/models/twice/ready")),
    "its row": Case(index),
    "ready without it": Case(get("/v2/health/ready")),
    "break it": Case(break_model),
    "a model that does not load": Case(post(LOAD.format("twice"), {}), gist="no luck"),
    "not ready": Case(get("/v2/health/ready")),
    "repair it": Case(repair_model),
    "load what was repaired": load("twice"),
    "the repaired one answers": Case(infer("twice", 2)),
    "ready again": Case(get("/v2/health/ready")),
    "another config": load("add_sub", config=json.dumps(OVERRIDE)),
    "is in force": Case(
        lambda endpoint: http_call(endpoint, "GET", "/v2/models/add_sub/config")["body"]["max_batch_size"]
    ),
    "a plain load leaves it": load("add_sub"),
    "so": Case(batch_size),
    "a model that exists only in a request": load(
        "made", **{"config": json.dumps(NEW), "file:1/model.py": base64.b64encode(CODE.encode()).decode()}
    ),
    "it answers, too": Case(infer("made", 5)),
    "files without a config": Case(
        post(LOAD.format("made2"), {"parameters": {"file:1/model.py": base64.b64encode(CODE.encode()).decode()}}),
        gist="'made2'",
    ),
    "a config that is not JSON": Case(
        post(LOAD.format("twice"), {"parameters": {"config": "{x"}}), gist="failed to load"
    ),
    "an unknown parameter over gRPC": load_by_rpc(
        "unrecognized load parameter 'foo'.", foo=ModelRepositoryParameter(string_param="x")
    ),
    "a config of the wrong type over gRPC": load_by_rpc(config=ModelRepositoryParameter(bytes_param=b"x")),
    "another repository's name": Case(post("/v2/repository/other/models/twice/load", {})),
    "an ensemble and its steps are unloaded": unload("ensemble", unload_dependents=True),
    "what is left": Case(index),
    "load over gRPC": Case(rpc("RepositoryModelLoad", model_name="one")),
    "unload over gRPC": Case(rpc("RepositoryModelUnload", model_name="one")),
    "what still answers": grpc.INFER["raw contents"],
}
