"""Both wires of a running server, connection by connection, and the bodies that arrive on them."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from hpack import Encoder
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from llmserve.backends.identity import IdentityBackend
from llmserve.backends.repeat import RepeatBackend
from llmserve.errors import LlmserveError
from llmserve.frontends.grpc.infer_messages import parse_request
from llmserve.frontends.grpc.large_messages import parse_large
from llmserve.frontends.http.generate_bodies import parse_generate
from llmserve.frontends.http.infer_bodies import parse_infer
from llmserve.frontends.shared.data_source import DataSource
from llmserve.frontends.shared.restrictions import API_OF_PATH
from llmserve.frontends.shared.shared_memory import SharedMemory
from llmserve.serving.core import InferenceCore, ServerSettings
from llmserve.serving.settings import ControlMode
from llmserve.wire.http2 import frames
from llmserve.wire.http2.frames import frame
from llmserve.wire.http2.messages import framed
from llmserve.wire.request_memory import RequestMemory
from tests.frontends.server import HOST, RunningServer, running_server
from tests.frontends.stub_core import CONFIGS, StubCore
from tests.fuzz.inputs import NUMBERS, any_json, damaged, edited, encoded
from tests.fuzz.target import Finding, Target

SILENCE_S = 0.03  # after which no more is expected from a client that has said everything
MAX_KEPT = 2**20  # bytes of an answer
ANSWER_S = 20  # a busy machine takes its time; what hangs does so for ever
HEALTH = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
MODELS = {
    "same": 'backend: "identity" max_batch_size: 4 input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } '
    'output { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }',
    "text": 'backend: "identity" input { name: "X" data_type: TYPE_STRING dims: [ -1 ] } '
    'output { name: "X" data_type: TYPE_STRING dims: [ -1 ] }',
    "turns": 'backend: "identity" max_batch_size: 2 input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } '
    'output { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } sequence_batching { }',
}  # fmt: skip
REQUEST = {
    "id": "r", "parameters": {"sequence_id": 1, "sequence_start": True, "priority": 1, "timeout": 9},
    "inputs": [{"name": "X", "shape": [1, 2], "datatype": "FP32", "data": [[1.5, 2]], "parameters": {}}],
    "outputs": [{"name": "X", "parameters": {"binary_data": True, "classification": 1}}],
}  # fmt: skip
NAMES = (
    "id", "inputs", "outputs", "parameters", "name", "shape", "datatype", "data", "binary_data_size", "X", "TEXT", "N",
    "text_input", "max_tokens", "stream", "shared_memory_region", "shared_memory_byte_size", "config", "file:1/a",
    "unload_dependents", "log_verbose_level", "log_format", "trace_level", "trace_rate", "key", "byte_size",
    "raw_handle",
)  # fmt: skip


@contextmanager
def real_server() -> Iterator[RunningServer]:
    """All that the front ends do, over models that hand back what they get. Nothing runs a client's code."""
    backends = {backend.name: backend for backend in (IdentityBackend(), RepeatBackend())}
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for name, config in MODELS.items():
            (Path(folder) / name / "1").mkdir(parents=True)
            (Path(folder) / name / "config.pbtxt").write_text(config)
        options = ServerSettings((Path(folder),), control_mode=ControlMode.EXPLICIT, load_at_start=tuple(MODELS))
        with running_server(lambda: InferenceCore(options, backends), allows_shared_memory=False) as running:
            core = running.core
            assert isinstance(core, InferenceCore)
            asyncio.run_coroutine_threadsafe(core.start(), running.loop).result(60)
            try:
                yield running
            finally:
                asyncio.run_coroutine_threadsafe(core.stop(1), running.loop).result(20)


class Wire:
    """A port of the server, to which each input is a connection."""

    def __init__(self, name: str, server: RunningServer, port: int) -> None:
        self._name = name
        self._server = server
        self._port = port

    def run(self, data: bytes) -> None:
        """Send all, half-close when there is silence; the server has to close, without a fault, and to live on."""
        with socket.create_connection((HOST, self._port), timeout=ANSWER_S) as client:
            sender = threading.Thread(target=_send, args=(client, data))  # it may have to read while it is sent to
            sender.start()
            answer = self._read(client, SILENCE_S)
            sender.join()
            with suppress(OSError):
                client.shutdown(socket.SHUT_WR)
            answer += self._read(client, ANSWER_S)
        if b"internal error" in answer:
            at = answer.index(b"internal error")
            raise Finding(f"{self._name}: the server says {answer[max(0, at - 100) : at + 200]!r}")
        begin = time.monotonic()
        with socket.create_connection((HOST, self._server.http_port), timeout=ANSWER_S) as client:
            client.sendall(HEALTH)
            if not client.recv(4096).startswith(b"HTTP/1.1 200"):
                raise Finding(f"{self._name}: the server is not well")
        if time.monotonic() - begin > ANSWER_S / 2:
            raise Finding(f"{self._name}: the server took {time.monotonic() - begin:.1f} s to say that it is well")

    def _read(self, client: socket.socket, silence_s: float) -> bytes:
        """What comes, until the end or a silence; once the client has half-closed, none may be long."""
        seen = b""
        client.settimeout(silence_s)
        try:
            while part := client.recv(65536):
                seen = (seen + part)[-MAX_KEPT:]
        except TimeoutError:
            if silence_s == ANSWER_S:
                raise Finding(f"{self._name}: the connection is not closed; its end is {seen[-200:]!r}") from None
        except ConnectionError:
            pass
        return seen


def _send(client: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        client.sendall(data)


# HTTP/1.1

HEADERS = (
    b"Host: x", b"Connection: keep-alive", b"Connection: close", b"Expect: 100-continue", b"Content-Encoding: gzip",
    b"Content-Encoding: deflate", b"Accept-Encoding: gzip;q=0.5, *;q=x", b"Upgrade: h2c", b"Connection: Upgrade",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity", b"Content-Type: application/json", b"Origin: null",
    b"Trailer: x", b"X: " + b"y" * 5000, b" folded: x", b": empty", b"a\x00b: c", b"Content-Length: 0x10",
    b"Range: bytes=0-",
)  # fmt: skip
PATHS = tuple(
    re.sub(r"\{\w+\}", "x", path.replace("{model}", "same").replace("{version}", "1")) for path in API_OF_PATH
)


@st.composite
def http_requests(draw: st.DrawFn) -> bytes:
    """Several on one connection, each with a body that is nearly what its headers say, and one that ends it."""
    return b"".join(draw(st.lists(_http_request(), min_size=1, max_size=3))) + HEALTH


@st.composite
def _http_request(draw: st.DrawFn) -> bytes:
    path = draw(st.sampled_from(PATHS) | st.just("/v2/models/same/infer") | st.text(max_size=8).map("/v2/".__add__))
    path = path.replace("same", draw(st.sampled_from(["same", "text", "turns", "no", "%2e%2e", "a%00"])))
    method = draw(st.sampled_from([b"POST", b"POST", b"GET", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT", b"PRI"]))
    body = draw(edited(REQUEST, NAMES).map(encoded) | any_json(NAMES).map(encoded) | st.binary(max_size=40))
    headers = draw(st.lists(st.sampled_from(HEADERS), max_size=4))
    if b"Content-Encoding: gzip" in headers and draw(st.booleans()):
        compressor = zlib.compressobj(wbits=31)
        body = compressor.compress(body) + compressor.flush()
    if draw(st.booleans()):
        headers.append(b"Inference-Header-Content-Length: %d" % draw(st.just(len(body)) | NUMBERS))
    if draw(st.booleans()):
        headers.append(b"Transfer-Encoding: chunked")
        body = _chunked(draw, body)
    else:
        headers.append(b"Content-Length: %d" % (len(body) if draw(st.integers(0, 5)) else draw(NUMBERS)))
    version = draw(st.sampled_from([b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0"]))
    head = b"%b %b %b\r\n%b\r\n" % (method, path.encode(), version, b"".join(line + b"\r\n" for line in headers))
    return head + body


def _chunked(draw: st.DrawFn, body: bytes) -> bytes:
    size = draw(st.integers(1, 30))
    pieces = [body[begin : begin + size] for begin in range(0, len(body), size)]
    chunks = b"".join(
        b"%x%b\r\n%b\r\n" % (len(piece), draw(st.sampled_from([b"", b";e=1"])), piece) for piece in pieces
    )
    return chunks + b"0\r\n" + draw(st.sampled_from([b"", b"trailer: 1\r\n", b"x: y\r\n" * 40])) + b"\r\n"


# HTTP/2

RPCS = tuple(rpc.name for rpc in service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods)
FIELDS = (
    ("grpc-timeout", "1m"), ("grpc-timeout", "99999999H"), ("grpc-timeout", "x"), ("grpc-encoding", "gzip"),
    ("grpc-encoding", "br"), ("grpc-accept-encoding", "gzip"), ("x-bin", "AAA"), ("x-bin", "!"),
    ("connection", "close"),
    ("content-length", "3"), ("te", "gzip"), (":path", "/x"), (":authority", ""), ("Upper", "x"), ("x", "\0"),
    ("y", "z" * 3000),
)  # fmt: skip


def grpc_messages() -> st.SearchStrategy[bytes]:
    return st.one_of(_infer_messages(), _load_messages(), st.binary(max_size=30))


@st.composite
def _infer_messages(draw: st.DrawFn) -> bytes:
    request = service_pb2.ModelInferRequest(
        model_name=draw(st.sampled_from(["same", "text", "turns", "no", ""])),
        model_version=draw(st.sampled_from(["", "1", "x"])),
    )
    for _ in range(draw(st.integers(0, 2))):
        shape = draw(st.lists(st.integers(-1, 4) | st.integers(-(2**63), 2**63 - 1), max_size=3))
        datatype = draw(st.sampled_from(["FP32", "BYTES", "INT32", "BF16", "nonsense"]))
        tensor = request.inputs.add(name=draw(st.sampled_from(["X", "Y"])), datatype=datatype, shape=shape)
        if draw(st.booleans()):
            tensor.contents.fp32_contents.extend([1.0] * draw(st.integers(0, 4)))
            tensor.contents.bytes_contents.extend([b"x"] * draw(st.integers(0, 2)))
        else:
            request.raw_input_contents.append(draw(st.binary(max_size=12) | st.just(b"\1\0\0\0a" * 2)))
        if not draw(st.integers(0, 3)):
            tensor.parameters["shared_memory_region"].string_param = "r"
    for name in draw(st.lists(st.sampled_from(["sequence_id", "sequence_start", "priority", "triton_x"]), max_size=2)):
        kind = draw(st.sampled_from(["bool_param", "int64_param", "string_param", "double_param"]))
        value = {"bool_param": True, "int64_param": -1, "string_param": "s", "double_param": 0.5}[kind]
        setattr(request.parameters[name], kind, value)
    return bytes(request.SerializeToString())


@st.composite
def _load_messages(draw: st.DrawFn) -> bytes:
    request = service_pb2.RepositoryModelLoadRequest(model_name=draw(st.sampled_from(["same", "../x", "", "new"])))
    if draw(st.booleans()):
        request.parameters["config"].string_param = draw(any_json(NAMES).map(encoded)).decode("utf-8", "replace")
    if draw(st.booleans()):
        request.parameters[draw(st.sampled_from(["file:1/a", "file:../x", "file:", "x"]))].bytes_param = b"x"
    return bytes(request.SerializeToString())


@st.composite
def http2_connections(draw: st.DrawFn) -> bytes:
    """A preface, then calls and single frames; header blocks come from one encoder, as a client's do."""
    encoder = Encoder()
    parts = [frames.PREFACE, frame(frames.SETTINGS, 0, 0, draw(_settings()))]
    for stream in range(1, 2 * draw(st.integers(1, 5)), 2):
        is_call = draw(st.integers(0, 3)) > 0
        parts.append(_call(draw, encoder, stream) if is_call else _odd_frame(draw, stream))
    return b"".join(parts)


@st.composite
def _settings(draw: st.DrawFn) -> bytes:
    pairs = draw(
        st.lists(
            st.tuples(st.integers(0, 9), st.sampled_from([0, 1, 2, 100, 16384, 65535, 2**24, 2**31, 2**32 - 1])),
            max_size=3,
        )
    )
    return b"".join(struct.pack(">HL", *pair) for pair in pairs)


def _call(draw: st.DrawFn, encoder: Encoder, stream: int) -> bytes:
    path = f"/inference.GRPCInferenceService/{draw(st.sampled_from(RPCS))}"
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
    for field in draw(st.lists(st.sampled_from(FIELDS), max_size=2)):
        fields.insert(draw(st.integers(0, len(fields))), field)
    block = encoder.encode(fields)
    cut = draw(st.integers(0, len(block)) | st.just(len(block)))
    whole = cut == len(block)
    head = frame(frames.HEADERS, frames.END_HEADERS if whole else 0, stream, block[:cut])
    rest = b"" if whole else frame(frames.CONTINUATION, frames.END_HEADERS, stream, block[cut:])
    messages = draw(st.lists(grpc_messages().map(framed) | st.binary(max_size=12), max_size=2))
    data = [frame(frames.DATA, 0, stream, message) for message in messages]
    end = frame(frames.DATA, frames.END_STREAM, stream) if draw(st.integers(0, 4)) else b""
    return head + rest + b"".join(data) + end


def _odd_frame(draw: st.DrawFn, stream: int) -> bytes:
    kind, flags = draw(st.integers(0, 12)), draw(st.sampled_from([0, 1, 4, 5, 8, 0x20, 0x2D, 255]))
    where = draw(st.sampled_from([0, 1, stream, stream + 1, 2**31 - 1]))
    return frame(kind, flags, where, draw(st.binary(max_size=20) | st.sampled_from([bytes(4), bytes(8), b"\xff" * 4])))


# bodies

CORE = StubCore()
MEMORY = SharedMemory()
REQUESTS = RequestMemory()


def source() -> DataSource:
    return DataSource(MEMORY, REQUESTS.share())


def read_infer(data: bytes) -> None:
    """The first byte chooses the model, and whether the second is the length of the JSON."""
    config = CORE.model_config(sorted(CONFIGS)[data[0] % len(CONFIGS)] if data else "echo")
    header = str(data[1]) if len(data) > 1 and data[0] & 0x80 else None
    parse_infer(data[2:], header, config, source(), version="")


def read_generate(data: bytes) -> None:
    name = sorted(CONFIGS)[data[0] % len(CONFIGS)] if data else "ensemble"
    parse_generate(data[1:], CORE.model_config(name), source(), model=name, version="")


def read_message(data: bytes) -> None:
    """As both sizes of messages are read."""
    for parse in (service_pb2.ModelInferRequest.FromString, partial(parse_large, share=REQUESTS.share())):
        with suppress(DecodeError, LlmserveError):
            parse_request(parse(data), CORE.model_config("echo"), source(), deadline=None)


def _after(num_bytes: int, bodies: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.builds(bytes.__add__, st.binary(min_size=num_bytes, max_size=num_bytes), bodies)


def body_targets() -> list[Target]:
    generate: dict[str, Any] = {"id": "g", "text_input": "a", "max_tokens": 4, "stream": True, "N": 2, "parameters": {}}
    infers = edited(REQUEST, NAMES).map(encoded) | any_json(NAMES).map(encoded)
    generates = edited(generate, NAMES).map(encoded) | any_json(NAMES).map(encoded)
    return [
        Target("infer", _after(2, damaged(infers, at_most=2)), read_infer),
        Target("generate", _after(1, damaged(generates, at_most=2)), read_generate),
        Target("message", damaged(grpc_messages()), read_message),
    ]


def wire_targets(server: RunningServer) -> list[Target]:
    return [
        Target("http", damaged(http_requests(), at_most=2), Wire("http", server, server.http_port).run),
        Target("http2", damaged(http2_connections(), at_most=2), Wire("http2", server, server.grpc_port).run),
    ]
