"""Requests that grow when they are read: with the number of their elements, or of their bytes."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from llmserve.wire.http2 import frames
from llmserve.wire.http2.frames import frame
from llmserve.wire.http2.messages import PREFIX
from tests.frontends.server import HOST
from tests.hostile.attacks import (
    MIB,
    at_once,
    binary_body,
    bomb,
    document,
    field,
    half_a_message,
    http2,
    infer_message,
    json_body,
    open_call,
    post,
    rpc,
    send,
    status,
    works,
)
from tests.hostile.conftest import EACH_BYTES, IS_STRICT, LIMIT_BYTES, Target, full_only

MANY = 10_000_000 if IS_STRICT else 1_200_000  # elements
ALLOWED = 1024 * 1024  # of BYTES
BODY = (60 if IS_STRICT else 6) * MIB
NUM_PEERS = 16 if IS_STRICT else 4
BOMB = (256 if IS_STRICT else 96) * MIB

EMPTY = b"\0\0\0\0"
OK, TOO_MUCH = grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED


def varints(count: int) -> bytes:
    return b"\xac\x02" * count  # 300


def one_text(size: int) -> bytes:
    return struct.pack("<I", size) + bytes(size)


def raw_texts(count: int) -> bytes:
    return infer_message("texts", "BYTES", count, [EMPTY * count])


GRPC: dict[str, tuple[Callable[[], bytes], grpc.StatusCode]] = {
    "raw texts": (lambda: raw_texts(MANY), TOO_MUCH),
    "raw texts, as many as there may be": (lambda: raw_texts(ALLOWED), OK),
    "more raw texts than the shape says": (
        lambda: infer_message("texts", "BYTES", 1, [EMPTY * MANY]), grpc.StatusCode.INVALID_ARGUMENT,
    ),
    "texts": (lambda: infer_message("texts", "BYTES", MANY, contents=b"\x42\0" * MANY), TOO_MUCH),
    "integers": (lambda: infer_message("integers", "INT32", MANY, contents=field(2, varints(MANY))), OK),
    "unpacked numbers": (
        lambda: infer_message("integers", "INT32", MANY, contents=b"\x10\1" * MANY), TOO_MUCH,
    ),
    "floats": (lambda: infer_message("floats", "FP32", MANY, contents=field(6, bytes(4 * MANY))), OK),
    "one raw text": (lambda: infer_message("texts", "BYTES", 1, [one_text(EACH_BYTES // 4)]), OK),
    "one text": (lambda: infer_message("texts", "BYTES", 1, contents=field(8, bytes(EACH_BYTES // 4))), OK),
    "raw contents": (lambda: infer_message("texts", "BYTES", 1, [b""] * MANY), TOO_MUCH),
    "inputs": (lambda: infer_message("texts", "BYTES", 1) + field(5, b"") * MANY, TOO_MUCH),
    "outputs": (lambda: infer_message("texts", "BYTES", 1) + field(6, b"") * MANY, TOO_MUCH),
    "parameters": (lambda: infer_message("texts", "BYTES", 1) + field(4, b"") * MANY, TOO_MUCH),
    "unknown fields": (lambda: infer_message("texts", "BYTES", 1) + b"\xf8\x07\0" * MANY, TOO_MUCH),
}  # fmt: skip


LARGE_GRPC = (
    "raw texts, as many as there may be", "one text", "unpacked numbers", "floats", "raw contents",
    "parameters", "unknown fields",
)  # fmt: skip


@pytest.mark.parametrize("method", full_only("ServerReady", among=("ModelInfer", "ServerReady")))
@pytest.mark.parametrize("what", full_only(*LARGE_GRPC, among=GRPC))
def test_many_elements_over_grpc(target: Target, what: str, method: str) -> None:
    """RPCs that take no data take no large message."""
    make, expected = GRPC[what]
    message = make()
    with target.watched():
        found = rpc(target.grpc_port, message, method=method)
    assert found is (expected if method == "ModelInfer" else TOO_MUCH)
    assert works(target.http_port, target.grpc_port)


def repeated(value: str, size: int, count: int | None = None) -> tuple[str, int]:
    count = count or size // (len(value) + 1)
    return ",".join([value] * count), count


def members(count: int) -> bytes:
    return ('{"inputs":[],' + ",".join(f'"{number}":1' for number in range(count)) + "}").encode()


REFUSED = (413, 500)  # by the number of values; by their type when they are fewer
HTTP: dict[str, tuple[Callable[[], bytes], int | tuple[int, ...]]] = {
    "small numbers": (lambda: json_body("INT32", *repeated("1", BODY)), 200),
    "numbers": (lambda: json_body("FP32", *repeated("1.2345678", BODY // 2)), 200),
    "numbers in small rows": (lambda: json_body("FP32", *rows(repeated("[1.5,2.5]", BODY))), 200),
    "numbers that end in a text": (lambda: json_body("INT32", repeated("1", BODY)[0] + ',"x"', 1), REFUSED),
    "texts": (lambda: json_body("BYTES", *repeated('"x"', BODY)), 413),
    "empty lists": (lambda: json_body("BYTES", *repeated("[]", BODY)), REFUSED),
    "empty objects": (lambda: json_body("BYTES", *repeated("{}", BODY)), REFUSED),
    "objects": (lambda: json_body("BYTES", *repeated('{"a":1}', BODY)), REFUSED),
    "members": (
        lambda: ('{"inputs":[],' + ",".join(f'"{n}":1' for n in range(BODY // 12)) + "}").encode(),
        (200, *REFUSED),
    ),
    "deep": (lambda: json_body("BYTES", "[" * (BODY // 2) + "]" * (BODY // 2), 1), 500),
    "spaces": (lambda: b" " * BODY, 500),
    "one text": (lambda: json_body("BYTES", '"' + "x" * BODY + '"', 1), 200),
    "one text of escapes": (lambda: json_body("BYTES", '"' + "\\u0416" * (BODY // 6) + '"', 1), 200),
    "one number": (lambda: json_body("INT32", "1" * BODY, 1), 500),
    "shape": (
        lambda: json_body("INT32", "", 0).replace(b'"shape": [0]', b'"shape": [%b]' % (b"1," * (BODY // 2) + b"1")),
        400,
    ),
}


def rows(texts: tuple[str, int]) -> tuple[str, int]:
    return texts[0], 2 * texts[1]


LARGE_HTTP = (
    "numbers", "numbers in small rows", "numbers that end in a text", "empty lists", "empty objects", "objects",
    "members", "one text of escapes", "shape",
)  # fmt: skip


@pytest.mark.parametrize("what", full_only(*LARGE_HTTP, among=HTTP))
def test_json(target: Target, what: str) -> None:
    make, expected = HTTP[what]
    body = make()
    model = "floats" if b'"FP32"' in body[:200] else "integers" if b'"INT32"' in body[:200] else "texts"
    with target.watched():
        answer = send(target.http_port, post(model, body))
    assert status(answer) in (expected if isinstance(expected, tuple) else (expected,)), answer[:300]
    assert works(target.http_port, target.grpc_port)


@pytest.mark.parametrize("count", full_only(ALLOWED, among=(MANY, ALLOWED)))
@pytest.mark.parametrize("output", [True, False], ids=["binary", "json"])
def test_binary_texts(target: Target, count: int, output: bool) -> None:
    body, header = binary_body("BYTES", count, EMPTY * count, output=output)
    with target.watched():
        answer = send(target.http_port, post("texts", body, header))
    assert status(answer) == (413 if count > ALLOWED else 200)
    assert works(target.http_port, target.grpc_port)


@contextmanager
def shared_memory(target: Target, data: bytes) -> Iterator[None]:
    path = Path("/dev/shm/llmserve-hostile")
    path.write_bytes(data)
    region = "/v2/systemsharedmemory/region/hostile"
    try:
        ask = json.dumps({"key": f"/{path.name}", "byte_size": len(data)}).encode()
        assert status(send(target.http_port, request(f"{region}/register", ask))) == 200
        yield
    finally:
        send(target.http_port, request(f"{region}/unregister", b""))
        path.unlink()


def request(path: str, body: bytes) -> list[bytes]:
    return [f"POST {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body]


@pytest.mark.parametrize("count", full_only(ALLOWED, among=(MANY, ALLOWED)))
def test_texts_in_shared_memory(target: Target, count: int) -> None:
    place = {"shared_memory_region": "hostile", "shared_memory_byte_size": 4 * count}
    ask = json.dumps(document("BYTES", count, parameters=place)).encode()
    with shared_memory(target, EMPTY * count), target.watched():
        answer = send(target.http_port, post("texts", ask))
    assert status(answer) == (413 if count > ALLOWED else 200), answer[:300]


def test_many_numbers_come_back_as_json(target: Target) -> None:
    count = MANY
    body, header = binary_body("FP32", count, np.full(count, 1.5, np.float32).tobytes(), output=False)
    with target.watched():
        answer = send(target.http_port, post("floats", body, header))
    assert status(answer) == 200
    assert answer.count(b"1.5") == count


def test_bombs(target: Target) -> None:
    """256 MiB in 256 KiB: refused when they are over the limit of a body, or of a request."""
    packed = bomb(BOMB)
    tail = bomb(MIB) + bytes(BODY - MIB)
    with target.watched():
        answer = send(target.http_port, post("texts", tail, "Content-Encoding: gzip"))
    assert status(answer) == 400
    with target.watched():
        answers = at_once(lambda: send(target.http_port, post("texts", packed, "Content-Encoding: gzip")), NUM_PEERS)
    assert {status(answer) for answer in answers} <= {413, 503}
    message = PREFIX.pack(1, len(packed)) + packed
    head = open_call(1).replace(b"\0\x02te\x08trailers", b"\0\x02te\x08trailers\0\x0dgrpc-encoding\x04gzip")
    head = frame(frames.HEADERS, frames.END_HEADERS, 1, head[frames.HEAD.size :])
    pieces = [message[start : start + 16_000] for start in range(0, len(message), 16_000)]
    data = b"".join(frame(frames.DATA, 0, 1, piece) for piece in pieces) + frame(frames.DATA, frames.END_STREAM, 1)
    with target.watched():
        at_once(lambda: http2(target.grpc_port, [head + data]), NUM_PEERS)
    assert works(target.http_port, target.grpc_port)


@pytest.mark.parametrize("value", full_only('"x"', "[]", "{}", among=("1", '"x"', "[]", "{}")))
def test_many_large_bodies_at_once(target: Target, value: str) -> None:
    body = json_body("INT32", *repeated(value, BODY))
    with target.watched():
        answers = at_once(lambda: send(target.http_port, post("integers", body)), NUM_PEERS)
    assert {status(answer) for answer in answers} <= {200, 413, 500, 503}
    assert works(target.http_port, target.grpc_port)


def test_many_large_messages_at_once(target: Target) -> None:
    message = infer_message("floats", "FP32", BODY // 4, [bytes(BODY)])
    with target.watched():
        found = at_once(lambda: rpc(target.grpc_port, message), NUM_PEERS)
    assert set(found) <= {OK, TOO_MUCH}
    assert works(target.http_port, target.grpc_port)


def test_bodies_and_messages_that_never_end_take_no_more_than_they_may(target: Target) -> None:
    """And are gone with their clients."""
    with target.watched():
        at_once(lambda: half_a_message(target.grpc_port, EACH_BYTES // 2, hold_s=1), 2 * LIMIT_BYTES // EACH_BYTES + 4)
        at_once(lambda: half_a_body(target.http_port, min(60 * MIB, EACH_BYTES // 2), hold_s=1), 24)
    assert works(target.http_port, target.grpc_port)
    whole = infer_message("floats", "FP32", EACH_BYTES // 32, [bytes(EACH_BYTES // 8)])
    assert rpc(target.grpc_port, whole) is OK


def half_a_body(port: int, size: int, *, hold_s: float) -> None:
    with closing(socket.create_connection((HOST, port), timeout=60)) as connection:
        head = f"POST /v2/models/texts/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {size + 1}\r\n\r\n"
        connection.sendall(head.encode())
        for _ in range(size // MIB):
            connection.sendall(b" " * MIB)
        time.sleep(hold_s)


def test_a_message_that_is_announced_too_large_is_refused_at_once(target: Target) -> None:
    with closing(socket.create_connection((HOST, target.grpc_port), timeout=10)) as connection:
        connection.sendall(frames.PREFACE + frame(frames.SETTINGS, 0, 0) + open_call(1))
        connection.sendall(frame(frames.DATA, 0, 1, b"\0" + struct.pack(">I", EACH_BYTES + 1)))
        received = b""
        while b"grpc-status" not in received:
            received += connection.recv(65536)
    assert received.split(b"grpc-status")[1][1:2] == b"8"


def test_large_answers_that_nobody_reads(target: Target) -> None:
    body, header = binary_body("FP32", BODY // 4, bytes(BODY))
    with target.watched():
        connections = [socket.create_connection((HOST, target.http_port), timeout=30) for _ in range(8)]
        for connection in connections:
            for piece in post("floats", body, header):
                connection.sendall(piece)
        time.sleep(1)
        for connection in connections:
            connection.close()
    assert works(target.http_port, target.grpc_port)
