"""Where llmserve answers otherwise than the real server, on purpose. docs/compatibility.md shows this table."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.compat.observe import Json, bytes_element

BOOM = "Failed to process the request(s) for model '{}', message: ValueError: boom\n\nAt:\n{}  model.py(..): execute\n"
EMPTY_BINARY = {"status": 200, "type": "application/octet-stream", "binary": ""}
SEEN = {
    "correlation_id": 0, "flags": 0, "id": "d", "outputs": ["SEEN"], "parameters": {"large": 2**64 - 1}, "timeout": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Difference:
    triton: str
    llmserve: str
    why: str
    cases: Mapping[str, Json] = field(default_factory=dict)  # "group: name of the case" -> what llmserve answers
    later: bool = False  # later releases of Triton answer as llmserve does

    def row(self) -> str:
        return f"| {self.triton} | {self.llmserve} | {self.why} |"


def tensor(name: str, datatype: str, shape: list[int] | list[str], **more: Json) -> dict[str, Json]:
    return {"name": name, "datatype": datatype, "shape": shape, **more}


DIFFERENCES = (
    Difference(
        "`generate` and `generate_stream` answer 400 to any error of a model",
        "the status of the error's code, as on `infer`",
        "load balancers and clients retry by the status; Triton's releases of 2026 do the same",
        {
            "streams: generate with a model that raises": {
                "status": 500,
                "body": {"error": BOOM.format("fail_0", "")},
            },
            "streams: events with an error at first": {"status": 500, "body": [{"error": "unlucky"}]},
            "streams: events of a model that raises": {
                "status": 500,
                "body": [{"error": BOOM.format("repeat_0_?", "  model.py(..): answer\n")}],
            },
        },
        later=True,
    ),
    Difference(
        "an answer whose binary tensors are all empty has no `Inference-Header-Content-Length`",
        "it has one",
        "a client that asked for binary tensors finds the empty ones in the usual place",
        {
            "binary: an empty tensor": EMPTY_BINARY
            | {
                "body": {
                    "model_name": "echo",
                    "model_version": "1",
                    "outputs": [tensor("OUT_INT32", "INT32", [0], parameters={"binary_data_size": 0})],
                }
            },
            "binary: an empty body": EMPTY_BINARY
            | {
                "body": {
                    "model_name": "one",
                    "model_version": "1",
                    "outputs": [tensor("Y", "INT32", [2, 0], parameters={"binary_data_size": 0})],
                }
            },
        },
    ),
    Difference(
        "a body that is not what `Content-Encoding` says is read as a raw tensor",
        "400, and why it cannot be decompressed",
        "the message names the real error",
        {
            "binary: a gzipped request that is not": {
                "status": 400,
                "body": {
                    "error": "the request body is not valid gzip data: Error -3 while decompressing data: incorrect "
                    "header check"
                },
            }
        },
    ),
    Difference(
        "a gRPC request parameter of type uint64 is refused",
        "the model gets it",
        "later releases of Triton pass it on too",
        {
            "grpc: a parameter of type uint64": {
                "model_name": "describe",
                "model_version": "1",
                "id": "d",
                "outputs": [tensor("SEEN", "BYTES", ["1", "1"])],
                "raw_output_contents": [base64.b64encode(bytes_element(json.dumps(SEEN).encode())).decode()],
            }
        },
    ),
    Difference(
        "a Python model's answer that is an error counts as success, and as an inference",
        "as a failure with reason `BACKEND`",
        "alerts on failures work",
        {
            "statistics: a model that answers an error": {
                "batch 1 compute_infer": 1,
                "batch 1 compute_input": 1,
                "batch 1 compute_output": 1,
                "execution_count": 1,
                "fail": 1,
            }
        },
    ),
    Difference(
        "an ensemble whose decoupled step raises counts two failures",
        "one",
        "one request failed",
        {
            "statistics: metrics of an ensemble that fails": {
                'nv_inference_request_failure model="stream",reason="OTHER",version="1"': 1.0
            }
        },
    ),
    Difference(
        "a load with files and without a config fails with 500",
        "400",
        "the request is wrong, not the server",
        {"control: files without a config": {"status": 400, "body": {"error": "'made2'"}}},
    ),
    Difference(
        "models that exist only in a load request are not in the index",
        "they are, until they are unloaded",
        "they answer requests, and can be unloaded",
        {
            "control: what is left": [
                {"name": "add_sub", "version": "1", "state": "READY"},
                {"name": "ensemble", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"},
                {"name": "made", "version": "1", "state": "READY"},
                {"name": "twice", "version": "1", "state": "READY"},
            ]
        },
    ),
    Difference(
        "if a model that is not decoupled sends a second response, a unary answer is an error after a body "
        "with both, and a stream's answer is not marked as final",
        "the first response is the answer, and final",
        "the model gets an exception; clients get an answer that they can read",
        {
            "streams: a sender of a unary model, two responses": {
                "responses": {
                    "a": [
                        {
                            "infer_response": {
                                "model_name": "sender",
                                "model_version": "1",
                                "id": "a",
                                "parameters": {"triton_final_response": {"bool_param": True}},
                                "outputs": [tensor("INDEX", "INT32", ["1"])],
                                "raw_output_contents": ["AAAAAA=="],
                            }
                        }
                    ]
                },
                "status": "OK",
            }
        },
    ),
    Difference(
        "a model whose correlation ID is a number gets the length and the first letters of a text ID",
        "a number computed from the whole text",
        "`sequence-1` and `sequence-2` are not the same sequence",
    ),
    Difference(
        "a body with both a `Content-Length` and a `Transfer-Encoding` is read by the latter",
        "400",
        "two lengths allow request smuggling past proxies",
    ),
    Difference(
        "answers have no `Date`, and a 503 says nothing more",
        "`Date`, and `Retry-After` with every 503",
        "HTTP requires the first, load balancers use the second",
    ),
    Difference(
        "the answer to HEAD has a body",
        "it has none",
        "a client reads it as the next answer",
    ),
    Difference(
        "every answer is compressed for a client that accepts it",
        "those of at least 256 bytes",
        "shorter ones grow",
    ),
    Difference(
        "some refusals say only what is wrong; an empty list of missing inputs is `]`",
        "the same words, then what to do or what was given; `[]`",
        "the reader does not have to look it up",
    ),
    Difference(
        "JSON errors have RapidJSON's words, and numbers are written as 1e300",
        "Python's words, and 1e+300",
        "another parser; the same values",
    ),
    Difference(
        "every answer of an ensemble repeats `sequence_id`, `sequence_start` and `sequence_end` of its request",
        "it does not",
        "the client knows them, and they make every streamed token longer",
    ),
    Difference(
        "some refusals name the request's id, others do not",
        "all errors of the core do: `[request id: ...]`",
        "a message can be traced to its request",
    ),
    Difference(
        "an unknown `trace_level` is ignored; an unknown `log_format` is 503 over HTTP",
        "400, INVALID_ARGUMENT",
        "the request is wrong, not the server",
    ),
    Difference(
        "a second region of one shared-memory object cannot be registered",
        "it can",
        "regions of one object are independent",
    ),
    Difference(
        "registering CUDA shared memory is 400 without a GPU",
        "501, UNIMPLEMENTED",
        "the server does not support it, with or without a GPU",
    ),
    Difference(
        "asking for the classes of a BYTES output ends the server",
        "400, INVALID_ARGUMENT",
        "only the request itself fails",
    ),
    Difference(
        "headers are not forwarded by `generate` and `generate_stream`",
        "they are",
        "the pattern applies to every request",
    ),
    Difference(
        "the end of a decoupled ensemble comes with its last answer, or alone, depending on thread timing",
        "alone, to clients with `triton_enable_empty_final_response`",
        "clients see the same every time",
    ),
    Difference(
        "client shared memory is always on in this release (`--allow-client-shm`, off by default, came later)",
        "off by default",
        "it lets clients read and write memory of the server's user",
    ),
    Difference(
        "a web page may load models and register shared memory",
        "403 to requests with an `Origin` header, unless these calls are restricted",
        "a page in a browser could run code on a server of the same machine",
    ),
    Difference(
        "headers that open restricted calls are forwarded to models when the pattern matches them",
        "they are not",
        "a key is for the server",
    ),
    Difference(
        "an unload over HTTP whose body is no JSON is carried out",
        "500, and why it cannot be parsed",
        "a truncated body may have said more",
    ),
    Difference(
        "a load that changes `instance_group` alone keeps the instances that stay",
        "the model is loaded again while the old one still answers",
        "one way to replace a model, whatever has changed",
    ),
    Difference(
        "a Python model's file is the module `model` to every library",
        "only with `EXECUTION_MODE` `process`",
        "in threads, many models share one interpreter",
    ),
    Difference(
        "a custom metric cannot be used when its `MetricFamily` object is gone",
        "it can, as long as an instance that has defined it",
        "a model may keep only the metric",
    ),
    Difference(
        "a model with a response cache has no `nv_inference_request_summary_us`",
        "it has one",
        "its requests take time, too",
    ),
    Difference(
        "files that a config names (labels, initial states, warm-up data, the model) may be anywhere",
        "inside the model's directory",
        "a config may come from a client, and labels are sent to one",
    ),
)
EXPECTED: Mapping[str, Json] = {name: answer for difference in DIFFERENCES for name, answer in difference.cases.items()}
