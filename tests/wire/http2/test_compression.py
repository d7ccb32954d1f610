"""Answers to inference, compressed for clients that understand it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from llmserve.wire.http2 import frames
from llmserve.wire.http2.messages import PREFIX, WINDOW_BITS
from llmserve.wire.inflation import PIECE_BYTES
from tests.frontends.server import RunningServer, running_server
from tests.frontends.stub_core import StubCore
from tests.wire.http2.raw_client import RawClient
from tests.wire.http2.test_connection import OK, READY, echo_message

ZEROS = bytes(40_000)  # within the window that a client has at first


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(StubCore, grpc_compression=6) as started:
        yield started


@pytest.fixture
def client(server: RunningServer) -> Iterator[RawClient]:
    made = RawClient(server.grpc_port)
    yield made
    made.socket.close()


def answer(client: RawClient, stream: int, method: str, message: bytes, accept: str) -> tuple[str, int, bytes]:
    """The encoding that the head of the answer names, whether the message is compressed, and its bytes."""
    client.call(stream, method, message, grpc_accept_encoding=accept)
    head = client.head(stream)
    data = client.until(frames.DATA, stream)
    flag, size = PREFIX.unpack_from(data)
    while len(data) < PREFIX.size + size:
        data += client.until(frames.DATA, stream)
    assert client.status(stream) == OK
    return head.get("grpc-encoding", "identity"), flag, data[PREFIX.size :]


def echoed(message: bytes) -> bytes:
    (content,) = service_pb2.ModelInferResponse.FromString(message).raw_output_contents
    return bytes(content)


@pytest.mark.parametrize(
    ("accept", "encoding"),
    [("identity, deflate, gzip", "gzip"), ("gzip", "gzip"), ("identity,deflate", "deflate"), ("zstd", "identity")],
)
def test_an_answer_has_an_encoding_that_the_client_takes(client: RawClient, accept: str, encoding: str) -> None:
    found, is_compressed, data = answer(client, 1, "ModelInfer", echo_message(ZEROS).SerializeToString(), accept)
    assert (found, bool(is_compressed)) == (encoding, encoding != "identity")
    if is_compressed:
        assert len(data) < len(ZEROS) / 50
        data = zlib.decompress(data, WINDOW_BITS[encoding])
    assert echoed(data) == ZEROS


def test_what_would_grow_is_sent_as_it_is(client: RawClient) -> None:
    encoding, is_compressed, data = answer(client, 1, "ModelInfer", echo_message(b"x").SerializeToString(), "gzip")
    assert (encoding, is_compressed) == ("gzip", 0)
    assert echoed(data) == b"x"


def test_only_inference_is_compressed(client: RawClient) -> None:
    assert answer(client, 1, "ServerReady", READY, "gzip")[:2] == ("identity", 0)


def test_streams_of_small_and_large_messages(server: RunningServer) -> None:
    sizes = (1, 2000, 2 * PIECE_BYTES, 3)
    with grpc.insecure_channel(server.grpc, options=[("grpc.max_receive_message_length", -1)]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for size in sizes:
            (response,) = stub.ModelStreamInfer(iter([echo_message(b"ab" * size)]), timeout=20)
            assert response.infer_response.raw_output_contents == [b"ab" * size]


def test_without_the_setting_answers_stay_as_they_are() -> None:
    with running_server(StubCore) as started:
        client = RawClient(started.grpc_port)
        assert answer(client, 1, "ModelInfer", echo_message(ZEROS).SerializeToString(), "gzip")[:2] == ("identity", 0)
        client.socket.close()
