"""HTTP: routes, metadata, JSON requests and their errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.compat.observe import Case, Json, get, http_call, post
from tools.servers import Endpoint

ADD_SUB = "/v2/models/add_sub/infer"
ECHO = "/v2/models/echo/infer"
SENDER = "/v2/models/sender/infer"
ROW = [1.0, 2.0, 3.0, 4.0]
RESERVED = "parameter keys starting with 'triton_' are reserved for Triton usage"


def fp32(name: str, data: Any = None, shape: Any = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": "FP32", "shape": shape or [1, 4], "data": data or ROW, **more}


LEFT, RIGHT = fp32("INPUT0"), fp32("INPUT1")
PAIR = [LEFT, RIGHT]


def without(entry: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in keys}


def add_sub(*inputs: Mapping[str, Any], gist: str = "", **members: Any) -> Case:
    return Case(post(ADD_SUB, {"inputs": list(inputs), **members}), gist)


def echo(datatype: str, data: Any, shape: Any = None, gist: str = "") -> Case:
    entry = {"name": f"IN_{datatype}", "datatype": datatype, "shape": shape or [len(data)], "data": data}
    return Case(post(ECHO, {"inputs": [entry], "outputs": [{"name": f"OUT_{datatype}"}]}), gist)


def describe(gist: str = "", **members: Any) -> Case:
    entry = {"name": "X", "datatype": "INT32", "shape": [1, 1], "data": [1]}
    return Case(post("/v2/models/describe/infer", {"inputs": [entry], **members}), gist)


def count(value: int) -> dict[str, Any]:
    return {"name": "COUNT", "datatype": "INT32", "shape": [1], "data": [value]}


def server_metadata(endpoint: Endpoint) -> Json:
    return sorted(http_call(endpoint, "GET", "/v2")["body"])


ROUTES = {
    "live": Case(get("/v2/health/live")),
    "ready": Case(get("/v2/health/ready")),
    "server metadata has these members": Case(server_metadata),
    "model metadata": Case(get("/v2/models/add_sub")),
    "model metadata of an ensemble": Case(get("/v2/models/ensemble")),
    "model metadata lists optional inputs": Case(get("/v2/models/optional")),
    "model metadata lists versions": Case(get("/v2/models/versions")),
    "model metadata of a version": Case(get("/v2/models/versions/versions/1")),
    "model is ready": Case(get("/v2/models/add_sub/ready")),
    "model version is ready": Case(get("/v2/models/versions/versions/3/ready")),
    "unknown model is not ready": Case(get("/v2/models/nope/ready")),
    "unknown version is not ready": Case(get("/v2/models/add_sub/versions/7/ready")),
    "unknown model": Case(get("/v2/models/nope")),
    "unknown version": Case(get("/v2/models/add_sub/versions/9")),
    "config of an unknown model": Case(get("/v2/models/nope/config")),
    "statistics of an unknown model": Case(get("/v2/models/nope/stats")),
    "version that is no number": Case(get("/v2/models/add_sub/versions/x")),
    "version that is too large": Case(get("/v2/models/add_sub/versions/99999999999999999999999")),
    "version zero": Case(get("/v2/models/add_sub/versions/0")),
    "unknown path": Case(get("/v2/nope")),
    "trailing slash": Case(get("/v2/models/add_sub/")),
    "infer wants POST": Case(get(ADD_SUB)),
    "metadata wants GET": Case(post("/v2/models/add_sub", {})),
    "index wants POST": Case(get("/v2/repository/index")),
    "HEAD is not GET": Case(lambda endpoint: http_call(endpoint, "HEAD", "/v2/health/live")),
    "index": Case(post("/v2/repository/index", b"")),
    "index of ready models": Case(post("/v2/repository/index", {"ready": True})),
    "load is not allowed": Case(post("/v2/repository/models/add_sub/load", {})),
    "unload is not allowed": Case(post("/v2/repository/models/add_sub/unload", {})),
    "config": Case(get("/v2/models/add_sub/config")),
    "config of an ensemble": Case(get("/v2/models/ensemble/config")),
    "config of an ensemble with a decoupled step": Case(get("/v2/models/stream/config")),
    "config with a batcher": Case(get("/v2/models/slow/config")),
    "config with priorities": Case(get("/v2/models/describe/config")),
    "config with reshape": Case(get("/v2/models/reshape/config")),
    "config with versions": Case(get("/v2/models/versions/config")),
}

INFER = {
    "no inputs at all": Case(post("/v2/models/no_input/infer", {"inputs": []})),
    "a sender of a unary model": Case(post(SENDER, {"inputs": [count(1)]})),
    "a sender of a unary model, no response": Case(post(SENDER, {"inputs": [count(0)]})),
    "two inputs": add_sub(*PAIR),
    "with an id": add_sub(*PAIR, id="r1"),
    "one output": add_sub(*PAIR, outputs=[{"name": "DIFFERENCE"}]),
    "outputs in another order": add_sub(*PAIR, outputs=[{"name": "DIFFERENCE"}, {"name": "SUM"}]),
    "an output named twice": add_sub(*PAIR, outputs=[{"name": "SUM"}, {"name": "SUM"}]),
    "no outputs named": add_sub(*PAIR, outputs=[]),
    "a batch of two": add_sub(fp32("INPUT0", [ROW, ROW], [2, 4]), fp32("INPUT1", [ROW, ROW], [2, 4])),
    "nested data": add_sub(fp32("INPUT0", [[[1, 2], [3, 4]]]), RIGHT),
    "unknown members are ignored": add_sub(*PAIR, nonsense=1),
    "integers for floats": add_sub(fp32("INPUT0", [1, 2, 3, 4]), RIGHT),
    "NaN and infinity": add_sub(fp32("INPUT0", [float("nan"), float("inf"), -float("inf"), 0]), RIGHT),
    "a version": Case(
        post(
            "/v2/models/versions/versions/1/infer",
            {"inputs": [{"name": "X", "datatype": "INT32", "shape": [1], "data": [0]}]},
        )
    ),
    "the highest version": Case(
        post("/v2/models/versions/infer", {"inputs": [{"name": "X", "datatype": "INT32", "shape": [1], "data": [0]}]})
    ),
    "an ensemble": Case(post("/v2/models/ensemble/infer", {"inputs": [fp32("LEFT"), fp32("RIGHT")], "id": "e"})),
    "reshape": Case(
        post(
            "/v2/models/reshape/infer",
            {"inputs": [{"name": "X", "datatype": "INT32", "shape": [3, 1], "data": [1, 2, 3]}]},
        )
    ),
    "BOOL": echo("BOOL", [True, False]),
    "UINT8": echo("UINT8", [0, 255]),
    "INT8": echo("INT8", [-128, 127]),
    "UINT16": echo("UINT16", [65535]),
    "INT64": echo("INT64", [2**63 - 1, -(2**63)]),
    "UINT64": echo("UINT64", [2**64 - 1]),
    "FP64": echo("FP64", [0.1, 1e300]),
    "FP32": echo("FP32", [0.5, 3]),
    "BYTES": echo("BYTES", ["text", "", "zwölf"]),
    "an empty tensor": echo("INT32", [], [0]),
    "request fields that a model sees": describe(
        id="r2", parameters={"priority": 3, "timeout": 5000000, "text": "a", "number": 7, "flag": True, "real": 1.5}
    ),
    "outputs that a model is asked for": describe(outputs=[{"name": "SEEN"}]),
}

ERRORS = {
    "not JSON": Case(post(ADD_SUB, b'{"inputs": nonsense'), gist="failed to parse the request JSON buffer: "),
    "a list": Case(post(ADD_SUB, b"[1]"), gist="Unable to parse"),
    "no inputs": Case(post(ADD_SUB, {})),
    "an input without a name": add_sub(without(LEFT, "name"), RIGHT),
    "an input without a shape": add_sub(without(LEFT, "shape"), RIGHT),
    "an input without a datatype": add_sub(without(LEFT, "datatype"), RIGHT),
    "an input without data": add_sub(without(LEFT, "data"), RIGHT),
    "a shape of text": add_sub({**LEFT, "shape": ["1", 4]}, RIGHT),
    "a negative dimension": add_sub({**LEFT, "shape": [-1, 4]}, RIGHT),
    "an input that is no object": Case(post(ADD_SUB, {"inputs": [1]})),
    "inputs that are no list": Case(post(ADD_SUB, {"inputs": 3})),
    "a name that is a number": add_sub({**LEFT, "name": 5}, RIGHT),
    "an id that is a number": add_sub(*PAIR, id=7),
    "too few elements": add_sub(fp32("INPUT0", [1, 2, 3]), RIGHT),
    "too many elements": add_sub(fp32("INPUT0", [1, 2, 3, 4, 5]), RIGHT),
    "text for numbers": add_sub(
        fp32("INPUT0", ["1", "2", "3", "4"]), RIGHT, gist="attempt to access JSON non-number as"
    ),
    "a fraction for an integer": echo("INT64", [1.5]),
    "text for an integer": echo("INT64", ["1"]),
    "an integer that is too large": echo("INT64", [2**63]),
    "a negative unsigned": echo("UINT64", [-1]),
    "a number for BOOL": echo("BOOL", [1]),
    "a number for BYTES": echo("BYTES", [1], gist="attempt to access JSON non-string as string"),
    "an unknown datatype": add_sub({**LEFT, "datatype": "FP31"}, RIGHT),
    "a datatype in lower case": add_sub({**LEFT, "datatype": "fp32"}, RIGHT),
    "FP16 in JSON": echo("FP16", [1.0]),
    "BF16 in JSON": echo("BF16", [1.0]),
    "another datatype": add_sub({**LEFT, "datatype": "INT32", "data": [1, 2, 3, 4]}, RIGHT),
    "another shape": add_sub(fp32("INPUT0", [1, 2, 3], [1, 3]), RIGHT),
    "another rank": add_sub(fp32("INPUT0", shape=[4]), RIGHT, gist="input 'INPUT0'"),
    "another shape without batches": Case(
        post("/v2/models/one/infer", {"inputs": [{"name": "X", "datatype": "INT32", "shape": [3], "data": [1, 2, 3]}]})
    ),
    "too large a batch": add_sub(fp32("INPUT0", [ROW] * 5, [5, 4]), fp32("INPUT1", [ROW] * 5, [5, 4])),
    "batches that differ": add_sub(
        fp32("INPUT0", [ROW] * 2, [2, 4]), RIGHT, gist="batch size does not match other inputs for 'add_sub'"
    ),
    "no batch dimension": add_sub({**LEFT, "shape": [], "data": [1.0]}, RIGHT),
    "a missing input": add_sub(LEFT),
    "a missing input beside optional ones": Case(
        post(
            "/v2/models/optional/infer",
            {"inputs": [{"name": "NEEDED", "datatype": "INT32", "shape": [1, 1], "data": [1]}]},
        )
    ),
    "too many inputs": add_sub(*PAIR, fp32("MORE"), gist="expected 2 inputs but got 3 inputs for model 'add_sub'."),
    "a wrong input": add_sub(LEFT, fp32("WRONG")),
    "an input twice": add_sub(LEFT, LEFT),
    "an unknown output": add_sub(*PAIR, outputs=[{"name": "NOPE"}]),
    "an output without a name": add_sub(*PAIR, outputs=[{}]),
    "an unknown model": Case(post("/v2/models/nope/infer", {"inputs": PAIR})),
    "an unknown version": Case(post("/v2/models/add_sub/versions/4/infer", {"inputs": PAIR})),
    "a decoupled model": Case(
        post("/v2/models/repeat/infer", {"inputs": [{"name": "COUNT", "datatype": "INT32", "shape": [1], "data": [1]}]})
    ),
    "an input that the ensemble does not declare": Case(
        post("/v2/models/ensemble/infer", {"inputs": [fp32("LEFT"), fp32("OTHER")]})
    ),
    "a parameter that is an object": describe(parameters={"a": {}}),
    "a parameter that is null": describe(parameters={"a": None}),
    "a parameter that is a list": describe(parameters={"a": [1]}),
    "parameters that are a list": describe(parameters=[1], gist="non-object"),
    "a reserved parameter": describe(parameters={"triton_x": 1}, gist=RESERVED),
    "a negative priority": describe(parameters={"priority": -1}),
    "a priority of text": describe(parameters={"priority": "1"}),
    "a timeout of text": describe(parameters={"timeout": "1"}),
    "a sequence flag of text": describe(parameters={"sequence_start": "yes"}),
    "a priority that is too high": describe(parameters={"priority": 9}),
    "an encoding that is not supported": Case(
        post(ADD_SUB, {"inputs": PAIR}, {"Content-Encoding": "br"}), gist="Unsupported compression type"
    ),
}


def fails(how: str, gist: str = "") -> Case:
    entry = {"name": "HOW", "datatype": "BYTES", "shape": [1], "data": [how]}
    return Case(post("/v2/models/fail/infer", {"inputs": [entry]}), gist)


CODES = ("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED")
FAILURES = {
    **{f"a model that answers {code}": fails(code) for code in CODES},
    "a model that answers an error without a code": fails("plain"),
    "a model that raises": fails("raise"),
    "a model that answers too little": fails(
        "too few", "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0"
    ),
    "a model that answers no list": fails("not a list", "Expected a list in the execute return, found type"),
    "a model that works again": fails("fine"),
    "a model with another datatype": fails("wrong dtype"),
    "a model with another shape": fails("wrong shape"),
    "a model with another name": fails("wrong name"),
}

CASES: Mapping[str, Case] = {**ROUTES, **INFER, **ERRORS, **FAILURES}
