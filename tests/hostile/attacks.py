"""Bytes that cost little to send and much to receive, and clients that send them."""

from __future__ import annotations

import json
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import repeat
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from llmserve.frontends.grpc.wire_fields import LENGTH_DELIMITED, encoded_varint
from llmserve.wire.http2 import frames
from llmserve.wire.http2.frames import frame
from tests.frontends.server import HOST

MIB = 1024 * 1024
PIECE_BYTES = 256 * 1024
SERVICE = "/inference.GRPCInferenceService/"
GZIP = 31


def in_pieces(data: bytes | memoryview) -> Iterator[memoryview]:
    view = memoryview(data)
    for start in range(0, len(view), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]


def send(port: int, pieces: Iterable[bytes | memoryview], *, timeout_s: float = 400) -> bytes:
    """What the server says to all of them, or to those that it takes; until it has said something and is silent."""
    received = bytearray()  # of a hundred megabytes, which `bytes` would copy for each piece
    with closing(socket.create_connection((HOST, port), timeout=60)) as connection:
        with suppress(OSError):
            for piece in pieces:
                connection.sendall(piece)
        connection.settimeout(timeout_s)
        with suppress(OSError):
            while chunk := connection.recv(PIECE_BYTES):
                received += chunk
                connection.settimeout(1)
    return bytes(received)


def at_once(act: Callable[[], Any], count: int) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(act) for _ in range(count)]]


def post(model: str, body: bytes, *headers: str) -> Iterator[bytes | memoryview]:
    return post_to(f"/v2/models/{model}/infer", body, *headers)


def post_to(path: str, body: bytes, *headers: str) -> Iterator[bytes | memoryview]:
    lines = [
        f"POST {path} HTTP/1.1",
        "Connection: close",
        f"Content-Length: {len(body)}",
        *headers,
        "\r\n",
    ]
    yield "\r\n".join(lines).encode()
    yield from in_pieces(body)


def status(answer: bytes) -> int:
    """0 for none."""
    return int(answer.split()[1]) if answer else 0


def document(datatype: str, count: int, **more: Any) -> dict[str, Any]:
    tensor = {"name": "IN", "datatype": datatype, "shape": [count], **more}
    return {"inputs": [tensor]}


def json_body(datatype: str, values: str, count: int) -> bytes:
    """`values`: the inside of the array."""
    text = json.dumps(document(datatype, count, data=[]))
    return text.replace('"data": []', f'"data": [{values}]').encode()


def binary_body(datatype: str, count: int, data: bytes, *, output: bool = True) -> tuple[bytes, str]:
    """And the header that says where the JSON ends."""
    request = document(datatype, count, parameters={"binary_data_size": len(data)})
    request["parameters"] = {"binary_data_output": output}
    text = json.dumps(request).encode()
    return text + data, f"Inference-Header-Content-Length: {len(text)}"


def bomb(num_bytes: int) -> bytes:
    """Inflates to so many spaces."""
    packer = zlib.compressobj(9, wbits=GZIP)
    return b"".join([*map(packer.compress, repeat(b" " * MIB, num_bytes // MIB)), packer.flush()])


# gRPC


def rpc(port: int, message: bytes, *, method: str = "ModelInfer", timeout_s: float = 120) -> grpc.StatusCode:
    """The status of a call whose message is already encoded."""
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"{HOST}:{port}", options=options) as channel:
        call = channel.unary_unary(SERVICE + method, request_serializer=bytes, response_deserializer=bytes)
        try:
            call(message, timeout=timeout_s)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK


def infer_message(model: str, datatype: str, count: int, raw: Sequence[bytes] = (), contents: bytes = b"") -> bytes:
    """Encoded here: protobuf would take as long as the server."""
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="IN", datatype=datatype, shape=[count])
    encoded = tensor.SerializeToString()
    if contents:
        encoded += field(5, contents)
    head = service_pb2.ModelInferRequest(model_name=model).SerializeToString()
    return b"".join([head, field(5, encoded), *(field(7, data) for data in raw)])


def field(number: int, data: bytes) -> bytes:
    return encoded_varint(number << 3 | LENGTH_DELIMITED) + encoded_varint(len(data)) + data


def http2(port: int, pieces: Iterable[bytes], *, timeout_s: float = 20) -> None:
    """A connection that begins as it should."""
    send(port, [frames.PREFACE + frame(frames.SETTINGS, 0, 0), *pieces], timeout_s=timeout_s)


def open_call(stream: int, method: str = "ModelInfer") -> bytes:
    fields = {
        b":method": b"POST", b":scheme": b"http", b":path": (SERVICE + method).encode(), b":authority": b"x",
        b"te": b"trailers", b"content-type": b"application/grpc",
    }  # fmt: skip
    return frame(frames.HEADERS, frames.END_HEADERS, stream, b"".join(literal(*pair) for pair in fields.items()))


def literal(name: bytes, value: bytes) -> bytes:
    """HPACK without a table; texts of less than 127 bytes, or of up to 16 KiB."""
    rest = len(value) - 127
    length = bytes((len(value),)) if rest < 0 else bytes((127, rest % 128 | 128, rest // 128))
    return b"\0" + bytes((len(name),)) + name + length + value


def half_a_message(port: int, size: int, *, hold_s: float) -> None:
    """Most of a message, and then nothing."""
    with closing(socket.create_connection((HOST, port), timeout=60)) as connection:
        connection.sendall(frames.PREFACE + frame(frames.SETTINGS, 0, 0) + open_call(1))
        connection.sendall(frame(frames.DATA, 0, 1, b"\0" + struct.pack(">I", size + 1)))
        connection.settimeout(2)
        with suppress(OSError):  # the server's window may be closed, or the call be over
            for start in range(0, size, frames.DEFAULT_MAX_FRAME):
                connection.sendall(frame(frames.DATA, 0, 1, b"x" * min(frames.DEFAULT_MAX_FRAME, size - start)))
        time.sleep(hold_s)


def works(http_port: int, grpc_port: int) -> bool:
    """Others are served as ever."""
    answer = send(http_port, post("floats", json_body("FP32", "1,2", 2)))
    stub_answer = rpc(grpc_port, infer_message("floats", "FP32", 2, [bytes(8)]))
    return status(answer) == 200 and stub_answer is grpc.StatusCode.OK
