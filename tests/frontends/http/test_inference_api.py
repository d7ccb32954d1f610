"""The HTTP front end: routes, infer with JSON and binary tensors, compression, and the errors of bad input."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

from llmserve.errors import LlmserveError, ResourceExhausted, Unavailable
from llmserve.frontends.http import inference_api as http_frontend
from llmserve.wire.event_loop import INLINE_BYTES
from llmserve.wire.inflation import PIECE_BYTES
from tests.frontends.server import HOST, MAX_INPUT_BYTES, RunningServer, wait_until
from tests.frontends.stub_core import CONFIGS, StubCore

ADD_TWO = "/v2/models/add_two/infer"
ECHO = "/v2/models/echo/infer"


class Http:
    """One request at a time, bodies and headers exactly as given."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection(HOST, port, timeout=10)

    def __call__(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        self.connection.request(method, path, raw, headers or {})
        self.response = self.connection.getresponse()
        return self.response.status, self.response.read()

    def error(self, *arguments: Any) -> tuple[int, str]:
        status, body = self(*arguments)
        assert self.response.headers["content-type"] in ("application/json", "text/plain")  # which: tests/compat
        document = json.loads(body)
        assert list(document) == ["error"]
        return status, document["error"]


@pytest.fixture
def call(server: RunningServer, core: StubCore) -> Iterator[Http]:
    made = Http(server.http_port)
    yield made
    made.connection.close()


def fp32(name: str, values: list[Any], shape: list[Any] | None = None) -> dict[str, Any]:
    return {"name": name, "datatype": "FP32", "shape": shape or [1, len(values)], "data": values}


def test_health_and_metadata(call: Http, core: StubCore) -> None:
    assert call("GET", "/v2/health/live") == (200, b"")
    assert call("GET", "/v2/health/ready") == (200, b"")
    assert json.loads(call("GET", "/v2")[1]) == {
        "name": "stub", "version": "1.2.3", "extensions": ["binary_tensor_data", "generate"],
    }  # fmt: skip
    assert json.loads(call("GET", "/v2/models/count/versions/1")[1])["inputs"][0] == {
        "name": "N", "datatype": "INT32", "shape": [1],
    }  # fmt: skip
    assert call("GET", "/v2/models/add_two/ready") == (200, b"")
    for path in ("/v2/models/nope/ready", "/v2/models/add_two/versions/7/ready"):
        assert call.error("GET", path) == (400, "Model version not ready")
    core.is_ready = False
    assert call("GET", "/v2/health/ready") == (400, b"")
    assert call("GET", "/v2/health/live")[0] == 200


def test_config_has_proto_names_enum_names_and_plain_numbers(call: Http) -> None:
    config = json.loads(call("GET", "/v2/models/add_two/config")[1])
    assert config["max_batch_size"] == 4
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    assert config["input"][0]["dims"] == [-1]
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 100
    assert config["parameters"] == {"greeting": {"string_value": "hello"}}
    assert "ensemble_scheduling" not in config


def test_statistics_and_index(call: Http) -> None:
    assert len(json.loads(call("GET", "/v2/models/stats")[1])["model_stats"]) == len(CONFIGS)
    (entry,) = json.loads(call("GET", "/v2/models/echo/stats")[1])["model_stats"]
    assert (entry["name"], entry["inference_count"]) == ("echo", 2**40)
    assert call.error("GET", "/v2/models/x/stats") == (400, "requested model 'x' is not available")
    assert json.loads(call("POST", "/v2/repository/index")[1]) == [
        {"name": "add_two", "version": "1", "state": "READY"},
        {"name": "wreck", "version": "1", "state": "UNAVAILABLE", "reason": "it is broken"},
    ]
    assert len(json.loads(call("POST", "/v2/repository/index", {"ready": True})[1])) == 1
    assert len(json.loads(call("POST", "/v2/repository/index", [])[1])) == 2


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/v2/", (404, "Not Found")),
        ("GET", "/v2/health/live/", (404, "Not Found")),
        ("GET", "/nowhere", (404, "Not Found")),
        ("GET", "/v2/models/echo/versions/x", (404, "Not Found")),
        ("POST", "/v2/models/echo/versions/-1/infer", (404, "Not Found")),
        ("POST", "/v2/health/live", (405, "Method Not Allowed")),
        ("GET", ECHO, (405, "Method Not Allowed")),
        ("GET", "/v2/repository/index", (405, "Method Not Allowed")),
        ("GET", "/v2/models/nope", (404, "Request for unknown model: 'nope' is not found")),
        ("GET", "/v2/models/echo/versions/9/config", (404, "Request for unknown model: 'echo' version 9 is not found")),
    ],
)
def test_paths_match_exactly(call: Http, method: str, path: str, expected: tuple[int, str]) -> None:
    assert call.error(method, path) == expected


def test_a_huge_version_number_is_refused(call: Http) -> None:
    status, text = call.error("GET", f"/v2/models/echo/versions/{'9' * 5000}")
    assert (status, "version should be an integral value > 0" in text) == (400, True)


def test_head_is_not_get(call: Http) -> None:
    assert call("HEAD", "/v2/health/live")[0] == 405


def test_json_infer(call: Http, core: StubCore) -> None:
    body = {
        "id": "r1",
        "inputs": [fp32("INPUT0", [[1, 2.5]], [1, 2]), fp32("INPUT1", [10, float("inf")], [1, 2])],
        "parameters": {"sequence_id": 7, "sequence_end": True, "priority": 2, "timeout": 9, "mine": 0.5},
        "outputs": [{"name": "OUTPUT0"}, {"name": "OUTPUT0"}],
    }
    status, answer = call("POST", ADD_TWO, body)
    assert (status, call.response.headers["content-type"]) == (200, "application/json")
    assert b"Infinity" in answer
    assert json.loads(answer) == {
        "id": "r1", "model_name": "add_two", "model_version": "1",
        "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [1, 2], "data": [11.0, float("inf")]}],
    }  # fmt: skip
    request = core.requests[0]
    assert (request.sequence_id, request.sequence_end, request.priority, request.timeout_us) == (7, True, 2, 9)
    assert (request.parameters, request.requested_outputs) == ({"mine": 0.5}, ("OUTPUT0",))


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("BOOL", [True, False]), ("INT8", [-128, 127]), ("UINT64", [0, 2**64 - 1]), ("INT64", [-(2**63), 1]),
        ("FP32", [0.5, 2.0]), ("FP64", [0.1, 1e300]), ("BYTES", ["Ж", ""]),
    ],
)  # fmt: skip
def test_json_datatypes_survive_the_round_trip(call: Http, datatype: str, values: list[Any]) -> None:
    body = {"inputs": [{"name": "X", "datatype": datatype, "shape": [2, 1], "data": values}]}
    (output,) = json.loads(call("POST", ECHO, body)[1])["outputs"]
    assert output == {"name": "X", "datatype": datatype, "shape": [2, 1], "data": values}


def test_nesting_need_not_match_the_shape(call: Http, core: StubCore) -> None:
    call("POST", ECHO, {"inputs": [fp32("X", [[1], [[2, 3]], 4], [2, 2])]})
    assert core.requests[0].inputs["X"].data.tolist() == [[1, 2], [3, 4]]


X1 = {"name": "X", "shape": [1], "datatype": "FP32", "data": [1]}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 500, "failed to parse the request JSON buffer: "),
        (b"\xff\xfe{}", 500, "failed to parse the request JSON buffer: "),
        (b"[" * 100_000, 500, "failed to parse the request JSON buffer: "),
        (b'{"id": "\\ud800"}', 500, "failed to parse the request JSON buffer: "),
        (b"1" * 5000, 500, "failed to parse the request JSON buffer: "),
        ([], 500, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        ({}, 500, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        ({"inputs": {}}, 500, "attempt to access JSON non-array as array"),
        ({"inputs": [{"shape": [1]}]}, 500, "Unable to parse 'name'"),
        ({"inputs": [{"name": "X", "datatype": "FP32"}]}, 500, "Unable to parse 'shape'"),
        ({"inputs": [{"name": "X", "shape": [1]}]}, 500, "Unable to parse 'datatype'"),
        (
            {"inputs": [X1 | {"shape": [-1]}]},
            500,
            "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        ({"inputs": [X1], "id": 5}, 500, "Unable to parse 'id': attempt to access JSON non-string as string"),
        (
            {"inputs": [X1 | {"data": [1, 2]}]},
            500,
            "Unable to parse 'data': Shape does not match true shape of 'data' field",
        ),
        ({"inputs": [X1 | {"shape": [2**63, 2**63]}]}, 400, "it has too many elements"),
        (
            {"inputs": [X1 | {"datatype": "INT64", "data": [1.5]}]},
            500,
            "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer",
        ),
        ({"inputs": [X1 | {"datatype": "INT64", "data": ["1"]}]}, 500, "non-signed-integer"),
        ({"inputs": [X1 | {"datatype": "INT64", "data": [2**63]}]}, 500, "non-signed-integer"),
        ({"inputs": [X1 | {"datatype": "INT64", "data": [True]}]}, 500, "non-signed-integer"),
        ({"inputs": [X1 | {"datatype": "UINT8", "data": [-1]}]}, 500, "non-unsigned-integer"),
        ({"inputs": [X1 | {"datatype": "BOOL", "data": [1]}]}, 500, "non-boolean as boolean"),
        ({"inputs": [X1 | {"datatype": "BYTES", "data": [1]}]}, 500, "non-string as string"),
        ({"inputs": [X1 | {"data": [None]}]}, 500, "non-number as double"),
        ({"inputs": [X1 | {"data": [10**400]}]}, 500, "non-number as double"),
        (
            {"inputs": [{"name": "X", "shape": [1], "datatype": "FP32"}]},
            400,
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            "'shared_memory_region' in 'parameters'. But no field is set",
        ),
        ({"inputs": [X1 | {"parameters": {"binary_data_size": 4}}]}, 400, "But set 'data' 'binary_data_size'"),
        ({"inputs": [X1 | {"datatype": "fp32"}]}, 400, "invalid datatype for input X"),
        ({"inputs": [X1 | {"datatype": "TYPE_INT64"}]}, 400, "unknown datatype 'TYPE_INT64'; write INT64"),
        ({"inputs": [X1 | {"datatype": "TYPE_STRING"}]}, 400, "write BYTES"),
        (
            {"inputs": [X1 | {"datatype": "FP16"}]},
            400,
            "receiving FP16 data via JSON is not supported. Please use the binary data format for input X",
        ),
        ({"inputs": [X1, X1]}, 400, "input 'X' already exists in request"),
        (
            {"inputs": [], "parameters": {"a": []}},
            400,
            "parameter 'a' has invalid type. It should be either 'int', 'bool', or 'string'.",
        ),
        ({"inputs": [], "parameters": {"a": None}}, 400, "parameter 'a' has invalid type"),
        ({"inputs": [], "parameters": {"triton_x": 1}}, 400, "parameter keys starting with 'triton_' are reserved"),
        ({"inputs": [], "parameters": {"triton_enable_empty_final_response": True}}, 400, "reserved"),
        ({"inputs": [], "parameters": {"priority": -1}}, 500, "Unable to parse 'priority'"),
        ({"inputs": [], "parameters": {"timeout": "1"}}, 500, "non-unsigned-integer as unsigned-integer"),
        ({"inputs": [], "parameters": {"sequence_start": 1}}, 500, "non-boolean as boolean"),
    ],
)
def test_bad_bodies_are_refused(call: Http, core: StubCore, body: Any, status: int, words: str) -> None:
    found, text = call.error("POST", ECHO, body)
    assert (found, words in text) == (status, True), text
    assert core.requests == []


def test_core_errors_have_their_status(call: Http, core: StubCore) -> None:
    assert call.error("POST", "/v2/models/broken/infer", {"inputs": []}) == (500, "boom")
    assert call.error("POST", "/v2/models/count/infer", {"inputs": []}) == (
        501, "HTTP end point doesn't support models with decoupled transaction policy",
    )  # fmt: skip
    core.is_ready = False
    assert call.error("POST", ECHO, {"inputs": []}) == (503, "the server is shutting down")


@pytest.mark.parametrize("kind", ["infer", "generate", "generate_stream"])
@pytest.mark.parametrize("failure", [ResourceExhausted("the queue is full"), Unavailable("Exceeds maximum queue size")])
def test_every_503_says_when_to_come_back(
    call: Http, core: StubCore, monkeypatch: pytest.MonkeyPatch, kind: str, failure: LlmserveError
) -> None:
    body: dict[str, Any] = {"inputs": []} if kind == "infer" else {}
    assert call("POST", f"/v2/models/broken/{kind}", body)[0] == 500
    assert call.response.headers["retry-after"] is None
    monkeypatch.setattr(core, "failure", failure)  # in-band
    assert call("POST", f"/v2/models/broken/{kind}", body)[0] == 503
    assert call.response.headers["retry-after"] == "1"
    core.is_ready = False  # raised
    assert call("POST", f"/v2/models/broken/{kind}", body)[0] == 503
    assert call.response.headers["retry-after"] == "1"


# ---- the binary tensor extension ----


def binary(document: Any, *tensors: bytes, length: int | str | None = None) -> tuple[bytes, dict[str, str]]:
    header = json.dumps(document).encode()
    return header + b"".join(tensors), {
        "Inference-Header-Content-Length": str(len(header) if length is None else length)
    }


def binary_input(name: str, size: int, shape: list[int], datatype: str = "FP32") -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": size}}


def test_binary_and_json_inputs_can_be_mixed(call: Http) -> None:
    document = {"inputs": [fp32("INPUT0", [1, 2]), binary_input("INPUT1", 8, [1, 2])]}
    body, headers = binary(document, np.array([3, 4], dtype="<f4").tobytes())
    assert json.loads(call("POST", ADD_TWO, body, headers)[1])["outputs"][0]["data"] == [4, 6]


def test_binary_outputs(call: Http) -> None:
    document = {
        "inputs": [fp32("A", [1.5], [1]), {"name": "B", "shape": [1], "datatype": "BYTES", "data": ["xy"]}],
        "outputs": [{"name": "A"}, {"name": "B", "parameters": {"binary_data": True}}],
    }
    _, answer = call("POST", ECHO, document)
    assert call.response.headers["content-type"] == "application/octet-stream"
    length = int(call.response.headers["Inference-Header-Content-Length"])
    a, b = json.loads(answer[:length])["outputs"]
    assert (a["data"], b["parameters"], "data" in b) == ([1.5], {"binary_data_size": 6}, False)
    assert answer[length:] == b"\x02\x00\x00\x00xy"


def test_all_outputs_binary_by_request_parameter_unless_they_are_named(call: Http) -> None:
    document = {"inputs": [fp32("A", [1.5], [1])], "parameters": {"binary_data_output": True}}
    _, answer = call("POST", ECHO, document)
    length = int(call.response.headers["Inference-Header-Content-Length"])
    assert np.frombuffer(answer[length:], dtype="<f4").tolist() == [1.5]
    _, answer = call("POST", ECHO, {**document, "outputs": [{"name": "A"}]})
    assert json.loads(answer)["outputs"][0]["data"] == [1.5]


def test_half_precision_needs_the_binary_format_for_outputs_too(call: Http) -> None:
    body, headers = binary({"inputs": [binary_input("X", 2, [1], "FP16")]}, b"\x00\x3c")
    assert call.error("POST", ECHO, body, headers) == (
        400,
        "sending FP16 data via JSON is not supported. Please use the binary data format for output X",
    )


@pytest.mark.parametrize(
    ("body_and_headers", "words"),
    [
        (binary({}, length=-5), "inference header size should be in range (0, 2), got: -5"),
        (binary({}, length=99), "inference header size should be in range (0, 2), got: 99"),
        (binary({"inputs": [binary_input("X", 4, [1])]}, b"ab"), "expecting 2 additional bytes for model 'echo'"),
        (
            binary({"inputs": [binary_input("X", 4, [1])]}, b"abcdef"),
            "unexpected additional input data for model 'echo'",
        ),
        (
            binary({"inputs": [binary_input("X", 4, [2])]}, b"abcd"),
            "input byte size mismatch for input 'X' for model 'echo'. Expected 8, got 4",
        ),
        (
            binary({"inputs": [binary_input("X", 5, [2], "BYTES")]}, b"\x01\x00\x00\x00a"),
            "expected 2 string elements for inference input 'X'",
        ),
        (binary({"inputs": [binary_input("X", 3, [1], "BYTES")]}, b"abc"), "incomplete string length indicator"),
        (binary({"inputs": [binary_input("X", 5, [1], "BYTES")]}, b"\x09\x00\x00\x00a"), "incomplete string data"),
    ],
)
def test_bad_binary_requests_are_refused(call: Http, body_and_headers: Any, words: str) -> None:
    status, text = call.error("POST", ECHO, *body_and_headers)
    assert (status, words in text) == (400, True), text


def test_raw_requests(call: Http, core: StubCore) -> None:
    status, answer = call("POST", "/v2/models/text/infer", b"any bytes", {"Inference-Header-Content-Length": "0"})
    assert status == 200
    assert core.requests[0].inputs["TEXT"].data.tolist() == [b"any bytes"]
    assert answer.endswith(b"\x09\x00\x00\x00any bytes")
    call(
        "POST", "/v2/models/floats/infer", np.arange(3, dtype="<f4").tobytes(), {"Inference-Header-Content-Length": "x"}
    )
    assert core.requests[1].inputs["X"].data.tolist() == [0, 1, 2]
    status, text = call.error("POST", ADD_TWO, b"")
    assert (status, "Raw request must only have 1 input" in text) == (400, True)
    status, text = call.error("POST", ECHO, b"any bytes", {"Inference-Header-Content-Length": "0"})
    assert (status, "the model must have input shape [1]" in text) == (400, True)
    status, text = call.error("POST", "/v2/models/matrix/infer", b"12345678", {"Inference-Header-Content-Length": "0"})
    assert (status, "more than one variable-sized dimension" in text) == (400, True)
    status, text = call.error("POST", "/v2/models/floats/infer", b"12345", {"Inference-Header-Content-Length": "0"})
    assert (status, "input byte size mismatch for input 'X'" in text) == (400, True)


# ---- bodies ----


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_requests(call: Http, encoding: str, compress: Any) -> None:
    document = {"inputs": [fp32("INPUT0", [1]), binary_input("INPUT1", 4, [1, 1])]}
    body, headers = binary(document, np.array([3], dtype="<f4").tobytes())
    status, answer = call("POST", ADD_TWO, compress(body), headers | {"Content-Encoding": encoding})
    assert (status, json.loads(answer)["outputs"][0]["data"]) == (200, [4])


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("gzip", "gzip"), ("deflate", "deflate"), ("gzip;q=0.5, deflate", "deflate"), ("*", "gzip"), ("gzip;q=0", None),
        ("br", None), ("identity, gzip;q=0.5", None), ("gzip;q=nonsense", None), ("", None),
    ],
)  # fmt: skip
def test_compressed_responses(call: Http, accept: str, expected: str | None) -> None:
    body = {"inputs": [fp32("X", [1.0] * 500, [500])]}
    _, answer = call("POST", ECHO, body, {"Accept-Encoding": accept})
    assert call.response.headers["content-encoding"] == expected
    decompress: dict[str | None, Callable[[bytes], bytes]] = {"gzip": gzip.decompress, "deflate": zlib.decompress}
    plain = decompress.get(expected, bytes)(answer)
    assert json.loads(plain)["outputs"][0]["data"] == [1.0] * 500


@pytest.mark.parametrize(
    ("body", "encoding", "status", "words"),
    [
        (b"{}", "br", 501, "Unsupported compression type"),
        (b"not gzip", "gzip", 400, "not valid gzip data"),
        (gzip.compress(b"{}")[:-4], "gzip", 400, "truncated"),
        (zlib.compress(b"{}") + b"more", "deflate", 400, "data after its end"),
        (gzip.compress(bytes(PIECE_BYTES)) + b"more", "gzip", 400, "data after its end"),
        (gzip.compress(b"{}") + bytes(2 * PIECE_BYTES), "gzip", 400, "data after its end"),
        (gzip.compress(b" " * (MAX_INPUT_BYTES + 1)), "gzip", 413, f"maximum allowed input size of {MAX_INPUT_BYTES}"),
    ],
    ids=["unknown", "no-gzip", "truncated", "trailing", "behind a full piece", "much behind", "bomb"],
)
def test_bad_compressed_bodies_are_refused(call: Http, body: bytes, encoding: str, status: int, words: str) -> None:
    found, text = call.error("POST", ECHO, body, {"Content-Encoding": encoding})
    assert (found, words in text) == (status, True), text


def spy_on_threads(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """The threads that call a function."""
    threads: list[int] = []
    real = getattr(owner, name)

    def spied(*arguments: Any, **keywords: Any) -> Any:
        threads.append(threading.get_ident())
        return real(*arguments, **keywords)

    monkeypatch.setattr(owner, name, spied)
    return threads


@pytest.mark.parametrize(
    ("parser", "path", "body"),
    [
        ("parse_infer", ECHO, {"inputs": [fp32("X", [1.5])]}),
        ("parse_generate", "/v2/models/echo/generate", {"TEXT": "x"}),
        ("parse_generate", "/v2/models/echo/generate_stream", {"TEXT": "x"}),
    ],
)
def test_large_bodies_are_parsed_off_the_event_loop(
    server: RunningServer, call: Http, monkeypatch: pytest.MonkeyPatch, parser: str, path: str, body: Any
) -> None:
    threads = spy_on_threads(monkeypatch, http_frontend, parser)
    loop_thread = asyncio.run_coroutine_threadsafe(_this_thread(), server.loop).result(10)
    small = json.dumps(body).encode()
    large = small + b" " * INLINE_BYTES
    answers = [call("POST", path, each) for each in (small, large)]
    assert answers[0] == answers[1]
    assert answers[0][0] == 200
    assert threads[0] == loop_thread != threads[1]


async def _this_thread() -> int:
    return threading.get_ident()


def test_a_small_body_that_inflates_is_decompressed_off_the_event_loop(
    server: RunningServer, call: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = spy_on_threads(monkeypatch, zlib, "decompressobj")
    loop_thread = asyncio.run_coroutine_threadsafe(_this_thread(), server.loop).result(10)
    body = zlib.compress(b'{"inputs": []}' + b" " * INLINE_BYTES)
    assert len(body) < 1000
    assert call("POST", ECHO, body, {"Content-Encoding": "deflate"})[0] == 200
    assert len(threads) == 1
    assert threads[0] != loop_thread


def test_a_body_over_the_limit_is_refused(call: Http, core: StubCore) -> None:
    status, text = call.error("POST", ECHO, b" " * (MAX_INPUT_BYTES + 1))
    assert (status, "--http-max-input-size" in text) == (413, True)
    assert call("GET", "/v2/health/live")[0] == 200
    assert call("POST", ECHO, b'{"inputs": []}' + b" " * (MAX_INPUT_BYTES - 14))[0] == 200


def test_an_endless_chunked_body_is_cut_off(server: RunningServer) -> None:
    with socket.create_connection((HOST, server.http_port), timeout=10) as connection:
        connection.sendall(b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        with pytest.raises(OSError):
            connection.sendall(chunk * 1000)


def test_garbage_instead_of_http(server: RunningServer, call: Http) -> None:
    with socket.create_connection((HOST, server.http_port), timeout=10) as connection:
        connection.sendall(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert call("GET", "/v2/health/live")[0] == 200


def test_a_client_that_leaves_during_its_body_is_forgotten(server: RunningServer, call: Http, core: StubCore) -> None:
    with socket.create_connection((HOST, server.http_port), timeout=10) as connection:
        connection.sendall(b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    assert call("POST", ECHO, {"inputs": []})[0] == 200
    assert len(core.requests) == 1


def test_a_client_that_leaves_cancels_its_unary_request(server: RunningServer, core: StubCore) -> None:
    body = b'{"inputs": []}'
    with socket.create_connection((HOST, server.http_port), timeout=10) as connection:
        head = f"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_until(lambda: core.running == 1)
    wait_until(lambda: core.running == 0)


def test_tritonclient_with_binary_data_and_compression(server: RunningServer, core: StubCore) -> None:
    x = np.arange(400, dtype=np.float32).reshape(4, 100)
    inputs = []
    for name, is_binary in (("INPUT0", True), ("INPUT1", False)):
        inputs.append(triton.InferInput(name, [4, 100], "FP32"))
        inputs[-1].set_data_from_numpy(x, binary_data=is_binary)
    with triton.InferenceServerClient(server.http) as client:
        result = client.infer(
            "add_two", inputs, request_id="t", request_compression_algorithm="gzip",
            response_compression_algorithm="deflate",
        )  # fmt: skip
        assert client.get_model_config("add_two")["max_batch_size"] == 4
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), x * 2)
    assert result.get_response()["id"] == "t"


# ---- metrics ----


def test_metrics_port(server: RunningServer) -> None:
    call = Http(server.metrics_port)
    status, text = call("GET", "/metrics")
    assert (status, call.response.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert b"\nup 1\n" in text
    assert call("GET", "/anything") == (200, b"")
    call.connection.close()
