"""What requests take of the memory is counted, bounded, and given back in whatever way they end."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2, service_pb2_grpc

from llmserve.errors import InvalidArgument, ResourceExhausted
from llmserve.frontends.http.numbers import Numbers
from llmserve.frontends.shared.extension_state import Extensions
from llmserve.wire.http2 import frames
from llmserve.wire.http2.frames import frame
from llmserve.wire.http2.messages import framed
from llmserve.wire.request_memory import USUAL_INTERVAL_S, RequestMemory, RequestTooLarge
from tests.frontends.server import HOST, RunningServer, running_server, wait_until
from tests.frontends.stub_core import StubCore
from tests.wire.http2.raw_client import RawClient

LIMIT, EACH = 1_500_000, 1_000_000
INFER = "/v2/models/echo/infer"
SMALL = b'{"inputs":[{"name":"TEXT","datatype":"BYTES","shape":[1],"data":["x"]}]}'


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server(StubCore, requests=RequestMemory(LIMIT, EACH)) as running:
        yield running


def taken(server: RunningServer) -> int:
    return server.extensions.requests.taken_bytes


def http(server: RunningServer, body: bytes, *headers: str, path: str = INFER, more: int = 0) -> socket.socket:
    """A connection on which a request has been sent, but for its last `more` bytes."""
    connection = socket.create_connection((HOST, server.http_port), timeout=20)
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body) + more}", *headers, "\r\n"]
    with suppress(ConnectionError):
        connection.sendall("\r\n".join(lines).encode() + body)
    return connection


def status(connection: socket.socket) -> int:
    with closing(connection):
        return int(connection.recv(65536).split()[1])


def echo(size: int) -> bytes:
    message = service_pb2.ModelInferRequest(model_name="echo", raw_input_contents=[bytes(size)])
    message.inputs.add(name="TEXT", datatype="UINT8", shape=[size])
    data: bytes = message.SerializeToString()
    return data


def slow(size: int) -> bytes:
    message = service_pb2.ModelInferRequest(model_name="slow", raw_input_contents=[bytes(4 * size)])
    message.inputs.add(name="X", datatype="INT32", shape=[size])
    data: bytes = message.SerializeToString()
    return data


def call(server: RunningServer, message: bytes, *, whole: bool = True, method: str = "ModelInfer") -> RawClient:
    """A connection with one call whose message has been sent, all of it or but for its last byte."""
    client = RawClient(server.grpc_port)
    client.send(frame(frames.HEADERS, frames.END_HEADERS, 1, client.headers(method)))
    data = framed(message)
    for start in range(0, len(data) - (not whole), 16_000):
        end = min(start + 16_000, len(data) - (not whole))
        is_last = whole and end == len(data)
        client.flood(frame(frames.DATA, frames.END_STREAM if is_last else 0, 1, data[start:end]))
    return client


def grpc_status(client: RawClient) -> str:
    with closing(client.socket):
        return client.status(1)["grpc-status"]


def test_a_request_over_the_limit_is_413_and_resource_exhausted(server: RunningServer) -> None:
    texts = b'{"inputs":[' + b",".join([b'"x"'] * 100_000) + b"]}"
    assert status(http(server, texts)) == 413  # each takes more than its letters
    assert grpc_status(call(server, echo(1_100_000))) == "8"
    assert grpc_status(call(server, echo(100))) == "0"
    wait_until(lambda: taken(server) == 0)


def test_requests_that_are_too_many_together_are_told_to_come_again(server: RunningServer) -> None:
    holding = [http(server, b" " * 500_000, more=1) for _ in range(2)]
    wait_until(lambda: taken(server) >= 1_000_000)
    calls = [call(server, echo(400_000), whole=False)]
    wait_until(lambda: taken(server) >= 1_400_000)
    with closing(http(server, b" " * 200_000)) as connection:
        answer = connection.recv(65536)
    assert b" 503 " in answer.split(b"\r\n")[0]
    assert b"retry-after" in answer.lower()
    assert b"--request-memory" in answer
    assert grpc_status(call(server, echo(200_000))) == "8"
    assert status(http(server, SMALL)) == 200  # small ones find room
    for connection in holding:
        connection.close()
    for client in calls:
        client.socket.close()
    wait_until(lambda: taken(server) == 0)


def test_streams_give_back_after_each_message(server: RunningServer) -> None:
    """Far more than the limit in all, one after the other."""
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        requests: list[service_pb2.ModelInferRequest] = [service_pb2.ModelInferRequest.FromString(echo(300_000))] * 20
        go_on = threading.Semaphore(1)

        def one_by_one() -> Iterator[service_pb2.ModelInferRequest]:
            for request in requests:
                go_on.acquire()
                yield request

        count = 0
        for response in stub.ModelStreamInfer(one_by_one(), timeout=60):
            assert not response.error_message
            count += 1
            go_on.release()
    assert count == 20
    wait_until(lambda: taken(server) == 0)


ENDINGS: dict[str, Callable[[RunningServer, random.Random], None]] = {
    "answered": lambda server, rnd: http(server, SMALL + b" " * rnd.randrange(300_000)).close(),
    "half a body": lambda server, rnd: http(server, b" " * rnd.randrange(300_000), more=1).close(),
    "a body that is too large": lambda server, rnd: http(server, b" " * 700_000).close(),
    "no JSON": lambda server, rnd: http(server, b"{" * rnd.randrange(300_000)).close(),
    "gzip": lambda server, rnd: http(
        server, gzip.compress(SMALL + b" " * rnd.randrange(10**6)), "Content-Encoding: gzip"
    ).close(),
    "half of gzip": lambda server, rnd: http(
        server, gzip.compress(rnd.randbytes(100_000))[:50_000], "Content-Encoding: gzip"
    ).close(),
    "cancelled": lambda server, rnd: http(server, slow_body(rnd.randrange(1, 30_000)), path=SLOW).close(),
    "unknown model": lambda server, rnd: http(server, b" " * 100_000, path="/v2/models/no/infer").close(),
    "a load": lambda server, rnd: http(server, b"{}" + b" " * 200_000, path="/v2/repository/models/m/load").close(),
    "events": lambda server, rnd: http(
        server, json.dumps({"N": -1, "pad": "x" * 70_000}).encode(), path="/v2/models/count/generate_stream"
    ).close(),
    "answered call": lambda server, rnd: call(server, echo(rnd.randrange(300_000))).socket.close(),
    "half a message": lambda server, rnd: call(server, echo(rnd.randrange(300_000)), whole=False).socket.close(),
    "cancelled call": lambda server, rnd: call(server, slow(rnd.randrange(1, 50_000))).socket.close(),
    "a large message of a small RPC": lambda server, rnd: call(
        server, echo(rnd.randrange(300_000)), method="ServerReady"
    ).socket.close(),
    "cancelled stream": lambda server, rnd: call(
        server, slow(rnd.randrange(1, 50_000)), method="ModelStreamInfer"
    ).socket.close(),
    "no message": lambda server, rnd: call(server, b"\xff" * rnd.randrange(1, 300_000)).socket.close(),
    "reset": lambda server, rnd: reset(call(server, slow(rnd.randrange(1, 50_000)))),
}
SLOW = "/v2/models/slow/infer"


def slow_body(count: int) -> bytes:
    tensor = {"name": "X", "datatype": "INT32", "shape": [count], "data": [1] * count}
    return json.dumps({"inputs": [tensor]}).encode()


def reset(client: RawClient) -> None:
    client.flood(frames.reset(1, 8))
    client.socket.close()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_becomes_of_requests_their_memory_is_given_back(server: RunningServer, seed: int) -> None:
    rnd = random.Random(seed)
    acts = [rnd.choice(list(ENDINGS)) for _ in range(40)] + list(ENDINGS)
    for act in acts:
        ENDINGS[act](server, rnd)
        assert 0 <= taken(server) <= LIMIT
    wait_until(lambda: taken(server) == 0)
    assert status(http(server, SMALL)) == 200


def test_the_limits_must_fit_together() -> None:
    with pytest.raises(InvalidArgument, match="--request-memory"):
        RequestMemory(10, 11)
    with pytest.raises(InvalidArgument, match="--request-memory-each"):
        RequestMemory(10, 0)


@given(st.lists(st.tuples(st.sampled_from("gshr"), st.integers(0, 3), st.integers(0, 40)), max_size=60))
def test_the_count_is_the_sum_of_the_shares(acts: list[tuple[str, int, int]]) -> None:
    memory = RequestMemory(100, 60)
    shares = [memory.share() for _ in range(4)]
    holders = [1] * 4
    for act, index, size in acts:
        share = shares[index]
        if act == "g" and holders[index]:
            before = share.num_bytes
            try:
                share.grow(size)
            except RequestTooLarge:
                assert before + size > 60
            except ResourceExhausted:
                assert sum(each.num_bytes for each in shares) + size > 100
        elif act == "s" and share.num_bytes:
            share.shrink(min(size, share.num_bytes))
        elif act == "h" and holders[index]:
            share.hold()
            holders[index] += 1
        elif act == "r" and holders[index]:
            share.release()
            holders[index] -= 1
        assert memory.taken_bytes == sum(each.num_bytes for each in shares) <= 100
    for share, count in zip(shares, holders, strict=True):
        for _ in range(count):
            share.release()
    assert memory.taken_bytes == 0


def test_numbers_from_json_count_for_what_they_take() -> None:
    share = RequestMemory().share()
    numbers = Numbers(share)
    numbers.add([1] * 1000)
    assert share.num_bytes == 4 * 1000
    numbers.add([2**40, 1.5])
    assert share.num_bytes == 4 * 1000 + 8 * 2
    numbers.array(np.dtype(np.float32))
    assert share.num_bytes == 4 * 1000 + 8 * 2 + 4 * 1002


async def test_work_keeps_its_share_when_its_caller_has_gone() -> None:
    memory = RequestMemory(100, 100)
    may_end = threading.Event()
    share = memory.share()
    share.grow(50)
    working = asyncio.create_task(memory.work(may_end.wait, share))
    queued = [asyncio.create_task(memory.work(may_end.wait, share)) for _ in range(5)]
    await asyncio.sleep(0.05)
    for task in (working, *queued):
        task.cancel()
    await asyncio.gather(working, *queued, return_exceptions=True)
    share.release()
    assert memory.taken_bytes == 50
    may_end.set()
    while memory.taken_bytes:  # noqa: ASYNC110 - of a thread
        await asyncio.sleep(0.01)
    memory.close()


async def test_threads_give_way_sooner_while_something_is_decoded() -> None:
    memory = RequestMemory()
    assert await memory.work(sys.getswitchinterval, memory.share()) < USUAL_INTERVAL_S
    while sys.getswitchinterval() != USUAL_INTERVAL_S:  # noqa: ASYNC110 - of a thread
        await asyncio.sleep(0.01)
    memory.close()


def test_extensions_have_their_own_memory() -> None:
    assert Extensions().requests is not Extensions().requests
