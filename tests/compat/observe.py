"""One request and what came of it, as plain JSON values that can be compared and recorded."""

from __future__ import annotations

import copy
import http.client
import json
import queue
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.compat.exchanges import http_exchange, keep
from tools.servers import HOST, Endpoint

Json: TypeAlias = Any
Message: TypeAlias = Any
HEADER_LENGTH = "Inference-Header-Content-Length"
TIMEOUT_S = 20.0
# what may differ in a text: where a file lies, which of two instances was free, whether the request's id is said
VARYING = (
    (re.compile(r"\S*/model\.py\(\d+\)"), "model.py(..)"),
    (re.compile(r"'repeat_0_\d'"), "'repeat_0_?'"),
    (re.compile(r"^((?:in ensemble '\w+', )?)\[request id: [^]]*\] "), r"\1"),
)
# members that only one of them has: Triton adds the first three to every answer of an ensemble, and the last is of a
# later release than the one that is compared
LEFT_OUT = ("sequence_id", "sequence_start", "sequence_end", "max_inflight_requests")


@dataclass(frozen=True)
class Case:
    """What a client does, and what it sees.

    `gist`: of error texts, the part in which both servers must agree. `num_tries`: of which one must be as expected,
    where moments of a few hundredths of a second decide and a busy machine may miss them.
    """

    run: Callable[[Endpoint], Json]
    gist: str = ""
    num_tries: int = 1

    def observe(self, endpoint: Endpoint) -> Json:
        return self.reduce(self.run(endpoint))

    def reduce(self, observed: Json) -> Json:
        """Texts that hold the gist become the gist; what may vary is left out."""
        if isinstance(observed, dict):
            reduced = {key: self.reduce(value) for key, value in observed.items() if key not in LEFT_OUT}
            return {key: value for key, value in reduced.items() if key != "parameters" or value}
        if isinstance(observed, list):
            return [self.reduce(value) for value in observed]
        if not isinstance(observed, str):
            return observed
        if self.gist and self.gist in observed:
            return self.gist
        for pattern, replacement in VARYING:
            observed = pattern.sub(replacement, observed)
        return observed


def http_call(
    endpoint: Endpoint, method: str, path: str, body: Json = None, headers: Mapping[str, str] | None = None
) -> Json:
    """Status and body; of a good answer with binary tensors, its JSON and the bytes after it in hexadecimal."""
    connection = http.client.HTTPConnection(HOST, endpoint.http_port, timeout=TIMEOUT_S)
    try:
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, raw, dict(headers or {}))
        answer = connection.getresponse()
        data = answer.read()
        keep(endpoint, http_exchange(f"{method} {path}", answer, data))
        seen: dict[str, Json] = {"status": answer.status}
        if answer.status == 200 and data:
            seen["type"] = answer.headers["content-type"]
        if header := answer.headers[HEADER_LENGTH]:
            seen["binary"] = data[int(header) :].hex()
            data = data[: int(header)]
        return seen | {"body": _plain(data)}
    finally:
        connection.close()


def _plain(data: bytes) -> Json:
    text = data.decode("utf-8", errors="backslashreplace")
    if text.startswith("data: "):
        return [_plain(event.removeprefix("data: ").encode()) for event in text.split("\n\n") if event]
    try:
        return json.loads(text, parse_constant=str)  # NaN and Infinity as texts: a record of them is plain JSON
    except ValueError:
        return text


def post(path: str, body: Json, headers: Mapping[str, str] | None = None) -> Callable[[Endpoint], Json]:
    return lambda endpoint: http_call(endpoint, "POST", path, body, headers)


def get(path: str) -> Callable[[Endpoint], Json]:
    return lambda endpoint: http_call(endpoint, "GET", path)


def grpc_call(endpoint: Endpoint, method: str, request: Message, timeout_s: float = TIMEOUT_S) -> Json:
    """The reply as JSON, or the status and its details."""
    with grpc.insecure_channel(endpoint.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            seen = as_json(getattr(stub, method)(request, timeout=timeout_s))
        except grpc.RpcError as error:
            seen = {"status": error.code().name, "error": error.details()}
    keep(endpoint, {"asked": method, "status": seen.get("status", "OK"), "answer": copy.deepcopy(seen)})
    return seen


def rpc(method: str, **fields: Any) -> Callable[[Endpoint], Json]:
    """`fields` are of the method's request message."""
    name = "ModelInferRequest" if method == "ModelInfer" else f"{method}Request"
    request = getattr(service_pb2, name)(**fields)
    return lambda endpoint: grpc_call(endpoint, method, request)


def stream(
    *requests: Message, timeout_s: float = TIMEOUT_S, errors_as_status: str | None = None
) -> Callable[[Endpoint], Json]:
    """One ModelStreamInfer call with all requests, then half-closed: the responses by request id, and the status.

    `errors_as_status`: what the client says under that name in its metadata.
    """
    metadata = [("triton_grpc_error", errors_as_status)] if errors_as_status is not None else None

    def run(endpoint: Endpoint) -> Json:
        outgoing: queue.SimpleQueue[Message] = queue.SimpleQueue()
        for request in (*requests, None):
            outgoing.put(request)
        by_id: dict[str, list[Json]] = {}
        status = "OK"
        with grpc.insecure_channel(endpoint.grpc) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            try:
                for reply in stub.ModelStreamInfer(iter(outgoing.get, None), timeout=timeout_s, metadata=metadata):
                    by_id.setdefault(reply.infer_response.id, []).append(as_json(reply))
            except grpc.RpcError as error:
                status = f"{error.code().name}: {error.details()}"
        seen = {"responses": by_id, "status": status}
        keep(endpoint, {"asked": "ModelStreamInfer", "status": status.split(":")[0], "answer": copy.deepcopy(seen)})
        return seen

    return run


def ends(run: Callable[[Endpoint], Json]) -> Callable[[Endpoint], Json]:
    """Only whether the last message of each request is final: an ensemble's end comes with its last answer or alone,
    as the threads of its steps happen to run."""

    def summarized(endpoint: Endpoint) -> Json:
        seen = run(endpoint)
        for request_id, replies in seen["responses"].items():
            flags = [reply["infer_response"].pop("parameters")["triton_final_response"] for reply in replies]
            data = [reply for reply in replies if "error_message" in reply or "outputs" in reply["infer_response"]]
            ended = [flag["bool_param"] for flag in flags]
            seen["responses"][request_id] = {"data": data, "ended once, at last": ended.index(True) == len(ended) - 1}
        return seen

    return summarized


def as_json(message: Message) -> Json:
    """Field names as in the proto file, int64 as strings, bytes as base64. Empty fields are left out."""
    return MessageToDict(message, preserving_proto_field_name=True)


def raw_input(name: str, datatype: str, shape: Sequence[int]) -> Message:
    return service_pb2.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)


def typed_input(name: str, datatype: str, shape: Sequence[int], **contents: Any) -> Message:
    return service_pb2.ModelInferRequest.InferInputTensor(
        name=name, datatype=datatype, shape=shape, contents=service_pb2.InferTensorContents(**contents)
    )


def infer_message(model: str, inputs: Iterable[Message], **fields: Any) -> Message:
    return service_pb2.ModelInferRequest(model_name=model, inputs=list(inputs), **fields)


def bytes_element(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def metrics(endpoint: Endpoint) -> dict[str, float]:
    """Every sample of `/metrics`, by its name with labels."""
    connection = http.client.HTTPConnection(HOST, endpoint.metrics_port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    pairs = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}
