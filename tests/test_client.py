"""The streaming client against a real gRPC server with a stub core."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import aclosing, closing, contextmanager, suppress
from typing import Any

import grpc
import numpy as np
import pytest

from llmserve.benchmark.http_client import parse_server
from llmserve.benchmark.openai_endpoint import only_model
from llmserve.client import Access, AsyncClient, Client
from llmserve.errors import DeadlineExceeded, InvalidArgument, LlmserveError, NotFound, Unavailable
from tests.frontends.server import HOST, RunningServer, wait_until
from tests.frontends.stub_core import StubCore


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.grpc) as made:
        yield made


def test_deltas_of_a_text_prompt(client: Client, core: StubCore) -> None:
    deltas = list(client.generate("one two three", max_tokens=9, request_id="r"))
    assert [delta.text for delta in deltas] == ["one ", "two ", "three ", ""]
    assert [delta.finish_reason for delta in deltas] == ["", "", "", "end_id"]
    last = deltas[-1]
    assert (last.prompt_tokens, last.completion_tokens, last.sequence_index) == (7, 3, 0)
    assert deltas[2].log_probs == (-6.0,)
    assert core.requests[0].request_id == "r"


def test_messages_travel_as_json(client: Client, core: StubCore) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Жук"}]
    assert next(client.generate(messages)).text == "Жук "
    assert json.loads(core.requests[0].inputs["messages"].data.item()) == messages
    assert "text_input" not in core.requests[0].inputs


def test_parameters_take_the_type_of_the_model_s_input(client: Client, core: StubCore) -> None:
    list(client.generate("x", max_tokens=5, stream=False, temperature=1, seed=2**64 - 1, stop_words=["a", "bc"]))
    inputs = core.requests[0].inputs
    found = {name: (tensor.datatype, tensor.data.tolist()) for name, tensor in inputs.items()}
    assert found == {
        "text_input": ("BYTES", [[b"x"]]),
        "max_tokens": ("INT32", [[5]]),
        "stream": ("BOOL", [[False]]),
        "temperature": ("FP32", [[1.0]]),
        "seed": ("UINT64", [[2**64 - 1]]),
        "stop_words": ("BYTES", [[b"a", b"bc"]]),
    }


def test_numpy_values_are_taken_as_what_they_are(client: Client, core: StubCore) -> None:
    words = np.array([b"a", b"bc"])
    values: dict[str, Any] = {
        "max_tokens": np.int64(5), "stream": np.bool_(False), "temperature": np.float32(0.7), "seed": np.uint64(2**63),
        "stop_words": words,
    }  # fmt: skip
    list(client.generate("x", **values))
    inputs = core.requests[0].inputs
    found = [inputs[name].data.tolist() for name in ("max_tokens", "stream", "seed", "stop_words")]
    assert found == [[[5]], [[False]], [[2**63]], [[b"a", b"bc"]]]
    assert inputs["temperature"].data[0, 0] == np.float32(0.7)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"heat": 3}, "has no input named heat; it has: max_tokens, messages, seed, stop_words"),
        ({"seed": -1}, "seed=-1 is not UINT64"),
        ({"seed": 2**64}, "is not UINT64"),
        ({"temperature": "hot"}, "temperature='hot' is not FP32"),
        ({"temperature": "0.5"}, "temperature='0.5' is not FP32"),
        ({"temperature": True}, "temperature=True is not FP32"),
        ({"temperature": 1e300}, "temperature=1e\\+300 is not FP32"),
        ({"max_tokens": 16.9}, "max_tokens=16.9 is not INT32: give int, not float"),
        ({"max_tokens": "16"}, "max_tokens='16' is not INT32"),
        ({"max_tokens": True}, "max_tokens=True is not INT32"),
        ({"max_tokens": None}, "max_tokens=None is not INT32"),
        ({"max_tokens": [[1]]}, "is not INT32"),
        ({"max_tokens": np.float32(16)}, "is not INT32"),
        ({"stream": "false"}, "stream='false' is not BOOL"),
        ({"stream": 0}, "stream=0 is not BOOL"),
        ({"stop_words": [b"a", 3]}, "is not BYTES: give str or bytes, not int"),
        ({"stop_words": ["\udc80"]}, "is not BYTES"),
    ],
)
def test_wrong_parameters_are_refused_before_anything_is_sent(
    client: Client, core: StubCore, parameters: Any, words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        list(client.generate("x", **parameters))
    sent = [request.inputs["text_input"].data.item() for request in core.requests]  # an earlier test's may come late
    assert b"x" not in sent


def test_closing_the_iterator_cancels_on_the_server(client: Client, core: StubCore) -> None:
    with closing(client.generate("forever")) as deltas:
        next(deltas)
        assert core.running == 1
    wait_until(lambda: core.running == 0)


def test_errors_of_the_model_and_of_the_server(client: Client, core: StubCore) -> None:
    deltas = client.generate("one fail")
    assert next(deltas).text == "one "
    with pytest.raises(LlmserveError, match="the model failed"):
        next(deltas)
    core.is_ready = False
    with pytest.raises(LlmserveError, match="shutting down"):
        next(client.generate("x"))


def test_unknown_model(server: RunningServer) -> None:
    with Client(server.grpc, model="nope") as client, pytest.raises(NotFound, match="'nope'"):
        next(client.generate("x"))


def test_timeout(client: Client, core: StubCore) -> None:
    with pytest.raises(DeadlineExceeded):
        list(client.generate("forever", timeout_s=0.2))
    wait_until(lambda: core.running == 0)


def test_nobody_answers() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    with (
        Client(f"grpc://{HOST}:{port}") as client,
        pytest.raises(Unavailable, match=f"no server answers at {HOST}:{port}"),
    ):
        next(client.generate("x"))


@pytest.mark.parametrize("key", ["schlüssel-0123456789", "key-0123456789abc\r"])
def test_a_key_that_no_header_can_carry(key: str) -> None:
    with pytest.raises(InvalidArgument, match="only printable ASCII characters"):
        AsyncClient("localhost:1", access=Access(key))


def test_another_port_of_the_server_is_told_from_no_server(server: RunningServer) -> None:
    for port in (server.http_port, server.metrics_port):
        with (
            Client(f"{HOST}:{port}") as client,
            pytest.raises(Unavailable, match=f"{HOST}:{port} is a port for HTTP or metrics, but this command uses"),
        ):
            next(client.generate("x"))
    for port, words in (
        (server.grpc_port, "it is a gRPC port; --url takes the server's HTTP port"),
        (server.metrics_port, "--url takes"),
    ):
        asking = only_model(parse_server(f"{HOST}:{port}", None), "")
        with pytest.raises(Unavailable, match=words):
            asyncio.run(asking)


@contextmanager
def breakable_route(port: int) -> Iterator[tuple[int, Callable[[], None]]]:
    """A port that leads to another one, until it is reset."""
    ends: list[socket.socket] = []

    def copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)

    def reset() -> None:
        linger = struct.pack("ii", 1, 0)
        ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        for end in ends:
            end.shutdown(socket.SHUT_RD)  # wakes the copying threads
            end.close()

    def serve(listener: socket.socket) -> None:
        accepted, _ = listener.accept()
        ends.extend((accepted, socket.create_connection((HOST, port), timeout=30)))
        other = threading.Thread(target=copy, args=(ends[1], ends[0]))
        other.start()
        copy(ends[0], ends[1])
        other.join()

    with socket.create_server((HOST, 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield listener.getsockname()[1], reset
        thread.join()


def test_a_connection_that_breaks_in_mid_stream_is_not_a_missing_server(server: RunningServer, core: StubCore) -> None:
    with breakable_route(server.grpc_port) as (port, reset), Client(f"{HOST}:{port}") as client:
        deltas = client.generate("forever")
        next(deltas)
        reset()
        with pytest.raises(Unavailable, match=f"the connection to {HOST}:{port} was lost: "):
            list(deltas)
    wait_until(lambda: core.running == 0)


async def test_a_connection_that_breaks_while_a_request_is_sent(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with breakable_route(server.grpc_port) as (port, reset):

        async def done_writing(call: Any) -> None:
            reset()
            raise grpc.aio.InternalError("Failed execute_batch")  # as gRPC does if it sees the reset now

        monkeypatch.setattr("grpc.aio._call.StreamStreamCall.done_writing", done_writing)
        async with AsyncClient(f"{HOST}:{port}") as client:
            with pytest.raises(Unavailable, match=f"the connection to {HOST}:{port} was lost: "):
                await anext(client.generate("forever"))


async def test_many_streams_of_one_async_client(server: RunningServer, core: StubCore) -> None:
    async def text(client: AsyncClient, prompt: str) -> str:
        async with aclosing(client.generate(prompt)) as deltas:
            return "".join([delta.text async for delta in deltas])

    prompts = [f"this is prompt {index} " for index in range(32)]
    async with AsyncClient(server.grpc) as client:
        assert await asyncio.gather(*(text(client, prompt) for prompt in prompts)) == prompts


async def test_async_close_cancels_and_errors_are_ours(server: RunningServer, core: StubCore) -> None:
    async with AsyncClient(server.grpc) as client:
        async with aclosing(client.generate("forever")) as deltas:
            await anext(deltas)
        await asyncio.to_thread(wait_until, lambda: core.running == 0)
        with pytest.raises(LlmserveError, match="the model failed"):
            await anext(client.generate("fail"))
    async with AsyncClient(server.grpc, model="nope") as client:
        with pytest.raises(NotFound):
            await anext(client.generate("x"))
