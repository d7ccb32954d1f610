"""gRPC: look-ups, unary inference and its errors."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import grpc
from tritonclient.grpc.service_pb2 import InferParameter, ModelInferRequest

from tests.compat.cases.http import CODES, RESERVED
from tests.compat.observe import (
    Case,
    Json,
    Message,
    bytes_element,
    grpc_call,
    infer_message,
    raw_input,
    rpc,
    typed_input,
)
from tools.servers import Endpoint

ROW = struct.pack("<4f", 1, 2, 3, 4)
FLOATS = [1.0, 2.0, 3.0, 4.0]
LEFT, RIGHT = raw_input("INPUT0", "FP32", [1, 4]), raw_input("INPUT1", "FP32", [1, 4])


def infer(model: str, *inputs: Message, raw: tuple[bytes, ...] = (), gist: str = "", **fields: Any) -> Case:
    request = infer_message(model, inputs, raw_input_contents=raw, **fields)
    return Case(lambda endpoint: grpc_call(endpoint, "ModelInfer", request), gist)


def add_sub(*inputs: Message, raw: tuple[bytes, ...] = (ROW, ROW), **fields: Any) -> Case:
    return infer("add_sub", *(inputs or (LEFT, RIGHT)), raw=raw, **fields)


def typed_add_sub(datatype: str = "FP32", **contents: Any) -> Case:
    right = typed_input("INPUT1", "FP32", [1, 4], fp32_contents=FLOATS)
    return add_sub(typed_input("INPUT0", datatype, [1, 4], **contents), right, raw=())


def echo(datatype: str, raw: bytes, count: int) -> Case:
    wanted = [ModelInferRequest.InferRequestedOutputTensor(name=f"OUT_{datatype}")]
    return infer("echo", raw_input(f"IN_{datatype}", datatype, [count]), raw=(raw,), outputs=wanted)


def typed_echo(datatype: str, field: str, values: list[Any]) -> Case:
    wanted = [ModelInferRequest.InferRequestedOutputTensor(name=f"OUT_{datatype}")]
    tensor = typed_input(f"IN_{datatype}", datatype, [len(values)], **{field: values})
    return infer("echo", tensor, outputs=wanted)


def describe(gist: str = "", **parameters: InferParameter) -> Case:
    tensor = typed_input("X", "INT32", [1, 1], int_contents=[1])
    return infer("describe", tensor, id="d", parameters=parameters, gist=gist)


def fails(how: bytes, gist: str = "") -> Case:
    return infer("fail", raw_input("HOW", "BYTES", [1]), raw=(bytes_element(how),), gist=gist)


def health(endpoint: Endpoint, service: bytes = b"") -> Json:
    with grpc.insecure_channel(endpoint.grpc) as channel:
        answer: bytes = channel.unary_unary("/grpc.health.v1.Health/Check")(service, timeout=10)
    return answer.hex()


LOOK_UPS = {
    "live": Case(rpc("ServerLive")),
    "ready": Case(rpc("ServerReady")),
    "model is ready": Case(rpc("ModelReady", name="add_sub")),
    "unknown model is not ready": Case(rpc("ModelReady", name="nope")),
    "unknown version is not ready": Case(rpc("ModelReady", name="add_sub", version="8")),
    "version that is no number": Case(rpc("ModelReady", name="add_sub", version="abc")),
    "metadata": Case(rpc("ModelMetadata", name="add_sub")),
    "metadata of an unknown model": Case(rpc("ModelMetadata", name="nope")),
    "metadata of an unknown version": Case(rpc("ModelMetadata", name="versions", version="2")),
    "config": Case(rpc("ModelConfig", name="add_sub")),
    "config of an unknown model": Case(rpc("ModelConfig", name="nope")),
    "statistics of an unknown model": Case(rpc("ModelStatistics", name="nope")),
    "index": Case(rpc("RepositoryIndex")),
    "index of ready models": Case(rpc("RepositoryIndex", ready=True)),
    "load is not allowed": Case(rpc("RepositoryModelLoad", model_name="add_sub")),
    "unload is not allowed": Case(rpc("RepositoryModelUnload", model_name="add_sub")),
    "standard health": Case(health),
    "standard health of a service": Case(lambda endpoint: health(endpoint, b"\x0a\x03any")),
}
INFER = {
    "raw contents": add_sub(id="r1"),
    "typed contents": typed_add_sub(fp32_contents=FLOATS),
    "one output": add_sub(outputs=[ModelInferRequest.InferRequestedOutputTensor(name="DIFFERENCE")]),
    "a version": infer("versions", raw_input("X", "INT32", [1]), raw=(b"0000",), model_version="1"),
    "the highest version": infer("versions", raw_input("X", "INT32", [1]), raw=(b"0000",)),
    "an ensemble": infer(
        "ensemble", raw_input("LEFT", "FP32", [1, 4]), raw_input("RIGHT", "FP32", [1, 4]), raw=(ROW, ROW)
    ),
    "an extra raw entry": add_sub(raw=(ROW, ROW, ROW)),
    "BF16": echo("BF16", b"\x80\x3f\x00\x40", 2),
    "FP16": echo("FP16", b"\x00\x3c", 1),
    "BYTES": echo("BYTES", bytes_element(b"ab", b"", b"\xff\x00"), 3),
    "typed BYTES": typed_echo("BYTES", "bytes_contents", [b"ab", b""]),
    "typed BOOL": typed_echo("BOOL", "bool_contents", [True, False]),
    "typed INT8": typed_echo("INT8", "int_contents", [-128, 127]),
    "typed INT64": typed_echo("INT64", "int64_contents", [2**63 - 1]),
    "typed UINT16": typed_echo("UINT16", "uint_contents", [65535]),
    "typed UINT64": typed_echo("UINT64", "uint64_contents", [2**64 - 1]),
    "typed FP64": typed_echo("FP64", "fp64_contents", [0.1]),
    "parameters that a model sees": describe(
        text=InferParameter(string_param="a"),
        number=InferParameter(int64_param=-7),
        flag=InferParameter(bool_param=True),
    ),
    "a parameter of type double": describe(real=InferParameter(double_param=1.5)),
    "a parameter of type uint64": describe(large=InferParameter(uint64_param=2**64 - 1)),
    "timeout": describe(timeout=InferParameter(int64_param=5_000_000)),
    "priority": describe(priority=InferParameter(uint64_param=1)),
    "a priority that is int64": describe(priority=InferParameter(int64_param=1)),
    "a sequence id of a number": describe(
        sequence_id=InferParameter(int64_param=42), sequence_start=InferParameter(bool_param=True)
    ),
    "a sequence id of text": describe(sequence_id=InferParameter(string_param="s1")),
    "sequence end": describe(sequence_id=InferParameter(int64_param=42), sequence_end=InferParameter(bool_param=True)),
}
ERRORS = {
    "an unknown model": infer("nope", LEFT, raw=(ROW,)),
    "an unknown version": add_sub(model_version="4"),
    "a version that is no number": add_sub(model_version="abc"),
    "an unknown datatype": add_sub(raw_input("INPUT0", "FP31", [1, 4]), RIGHT),
    "another datatype": add_sub(raw_input("INPUT0", "INT32", [1, 4]), RIGHT),
    "another shape": add_sub(raw_input("INPUT0", "FP32", [1, 3]), RIGHT, raw=(ROW[:12], ROW)),
    "a size that is not the shape's": add_sub(raw=(ROW[:12], ROW)),
    "too large a batch": add_sub(
        raw_input("INPUT0", "FP32", [5, 4]), raw_input("INPUT1", "FP32", [5, 4]), raw=(ROW * 5, ROW * 5)
    ),
    "batches that differ": add_sub(
        raw_input("INPUT0", "FP32", [2, 4]),
        RIGHT,
        raw=(ROW * 2, ROW),
        gist="batch size does not match other inputs for 'add_sub'",
    ),
    "no shape": add_sub(raw_input("INPUT0", "FP32", []), RIGHT, raw=(ROW[:4], ROW)),
    "a missing input": add_sub(LEFT, raw=(ROW,)),
    "too many inputs": add_sub(
        LEFT, RIGHT, raw_input("MORE", "FP32", [1, 4]), raw=(ROW, ROW, ROW), gist="expected 2 inputs but got 3 inputs"
    ),
    "a wrong input": add_sub(LEFT, raw_input("WRONG", "FP32", [1, 4])),
    "an input twice": add_sub(LEFT, LEFT),
    "an unknown output": add_sub(outputs=[ModelInferRequest.InferRequestedOutputTensor(name="NOPE")]),
    "no data": add_sub(raw=()),
    "too little raw data": add_sub(raw=(ROW,)),
    "raw and typed data": add_sub(typed_input("INPUT0", "FP32", [1, 4], fp32_contents=FLOATS), RIGHT),
    "contents of another type": typed_add_sub(int_contents=[1, 2, 3, 4]),
    "too few typed elements": Case(
        typed_add_sub(fp32_contents=[1.0]).run, gist="input byte size mismatch for input 'INPUT0'"
    ),
    "FP16 in typed contents": typed_echo("FP16", "fp32_contents", [1.0]),
    "BF16 in typed contents": typed_echo("BF16", "fp32_contents", [1.0]),
    "a truncated string": Case(
        echo("BYTES", b"\x05\x00\x00\x00abc", 1).run, gist="incomplete string data for inference input"
    ),
    "too few strings": echo("BYTES", bytes_element(b"a"), 2),
    "a decoupled model": infer("repeat", typed_input("COUNT", "INT32", [1], int_contents=[1])),
    "a sequence id of the wrong type": describe(sequence_id=InferParameter(bool_param=True)),
    "a sequence flag of the wrong type": describe(sequence_start=InferParameter(int64_param=1)),
    "a priority of the wrong type": describe(
        "invalid value type for 'priority' parameter", priority=InferParameter(string_param="1")
    ),
    "a timeout of the wrong type": describe(timeout=InferParameter(string_param="1")),
    "a parameter without a value": describe("'nothing'", nothing=InferParameter()),
    "a reserved parameter": describe(RESERVED, triton_x=InferParameter(int64_param=1)),
}
FAILURES = {
    **{f"a model that answers {code}": fails(code.encode()) for code in CODES},
    "a model that raises": fails(b"raise"),
    "a model that answers too little": fails(
        b"too few", "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0"
    ),
    "a model that works again": fails(b"fine"),
}
CASES: Mapping[str, Case] = {**LOOK_UPS, **INFER, **ERRORS, **FAILURES}
