"""HTTP with binary tensors: JSON of a stated length, then the bytes; and requests that are nothing but bytes."""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from tests.compat.cases.http import ADD_SUB, ECHO, PAIR
from tests.compat.observe import HEADER_LENGTH, Case, Json, bytes_element, post
from tools.servers import Endpoint

ROW = struct.pack("<4f", 1, 2, 3, 4)


def binary(
    document: Mapping[str, Any], data: bytes, *, path: str = ECHO, length: str | None = None
) -> Callable[[Endpoint], Json]:
    header = json.dumps(document).encode()
    return post(path, header + data, {HEADER_LENGTH: length if length is not None else str(len(header))})


def entry(name: str, datatype: str, shape: list[int], size: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}


def echo(datatype: str, shape: list[int], data: bytes, *, size: int | None = None, gist: str = "") -> Case:
    """`size`: what the request says of its data."""
    given = entry(f"IN_{datatype}", datatype, shape, len(data) if size is None else size)
    wanted = {"name": f"OUT_{datatype}", "parameters": {"binary_data": True}}
    return Case(binary({"inputs": [given], "outputs": [wanted]}, data), gist)


def sent_as_json(datatype: str) -> Case:
    document = {"inputs": [entry(f"IN_{datatype}", datatype, [1], 2)], "outputs": [{"name": f"OUT_{datatype}"}]}
    return Case(binary(document, b"\x00\x3c"), gist=f"sending {datatype} data via JSON is not supported")


def add_sub(*outputs: Mapping[str, Any], parameters: Mapping[str, Any] | None = None) -> Case:
    inputs = [entry("INPUT0", "FP32", [1, 4], 16), entry("INPUT1", "FP32", [1, 4], 16)]
    document: dict[str, Any] = {"inputs": inputs}
    if outputs:
        document["outputs"] = outputs
    if parameters is not None:
        document["parameters"] = parameters
    return Case(binary(document, ROW + ROW, path=ADD_SUB))


def encoded(encoding: str, compress: Callable[[bytes], bytes]) -> Case:
    return Case(post(ADD_SUB, compress(json.dumps({"inputs": PAIR}).encode()), {"Content-Encoding": encoding}))


ONE = "/v2/models/one/infer"
ALL_IN_ONE = {HEADER_LENGTH: "0"}
GOOD = {
    "binary in, JSON out": add_sub(),
    "binary in and out": add_sub(parameters={"binary_data_output": True}),
    "one output binary, one JSON": add_sub(
        {"name": "SUM", "parameters": {"binary_data": True}}, {"name": "DIFFERENCE"}
    ),
    "all binary but one": add_sub(
        {"name": "SUM", "parameters": {"binary_data": False}},
        {"name": "DIFFERENCE"},
        parameters={"binary_data_output": True},
    ),
    "one input binary, one JSON": Case(
        binary({"inputs": [entry("INPUT0", "FP32", [1, 4], 16), PAIR[1]]}, ROW, path=ADD_SUB)
    ),
    "FP16": echo("FP16", [2], struct.pack("<2e", 1.5, -2)),
    "BF16": echo("BF16", [2], b"\x80\x3f\x00\x40"),
    "BOOL": echo("BOOL", [3], b"\x01\x00\x01"),
    "BYTES": echo("BYTES", [3], bytes_element(b"ab", b"", b"\xff\x00")),
    "an empty tensor": echo("INT32", [0], b""),
    "a raw request": Case(post(ONE, struct.pack("<6i", *range(6)), ALL_IN_ONE)),
    "a gzipped request": encoded("gzip", gzip.compress),
    "a deflated request": encoded("deflate", zlib.compress),
}


def binary_body(data: bytes) -> bytes:
    """Of a client that forgets to say how long its JSON is."""
    half = len(data) // 2
    inputs = [entry(name, "FP32", [1, 4], half) for name in ("INPUT0", "INPUT1")]
    return json.dumps({"inputs": inputs}).encode() + data


ERRORS = {
    "FP16 output in JSON": sent_as_json("FP16"),
    "BF16 output in JSON": sent_as_json("BF16"),
    "too little data": echo("INT32", [2], b"1234", size=8),
    "too much data": echo("INT32", [1], b"12345678", size=4),
    "a size that is not the shape's": echo("INT32", [4], b"x" * 12),
    "too few strings": echo("BYTES", [2], bytes_element(b"a")),
    "too many strings": echo("BYTES", [1], bytes_element(b"a", b"b")),
    "a truncated length": echo(
        "BYTES", [1], b"\x01\x00", gist="incomplete string length indicator for inference input"
    ),
    "a truncated string": echo("BYTES", [1], b"\x05\x00\x00\x00abc", gist="incomplete string data for inference input"),
    "a negative header length": Case(post(ONE, b"x" * 125, {HEADER_LENGTH: "-5"})),
    "a header longer than the body": Case(post(ONE, b"x" * 125, {HEADER_LENGTH: "126"})),
    "binary data that nothing announces": Case(post(ADD_SUB, binary_body(b"\0" * 32))),
    "a header length that is no number": Case(post(ONE, b"x" * 24, {HEADER_LENGTH: "many"})),
    "a raw request for two inputs": Case(post(ADD_SUB, ROW, ALL_IN_ONE), gist="aw request"),
    "a raw request of an odd size": Case(post(ONE, b"x" * 7, ALL_IN_ONE), gist="Expected 0, got 7"),
    "an empty body": Case(post(ONE, b"")),
    "data and binary data": Case(
        binary({"inputs": [{**entry("IN_INT32", "INT32", [1], 4), "data": [1]}]}, b"1234"),
        gist="Input must set only one of the following fields",
    ),
    "a binary size of text": Case(
        binary({"inputs": [{**entry("IN_INT32", "INT32", [1], 4), "parameters": {"binary_data_size": "4"}}]}, b"1234"),
    ),
    "a gzipped request that is not": encoded("gzip", bytes),
}
CASES: Mapping[str, Case] = {**GOOD, **ERRORS}
