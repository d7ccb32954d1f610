"""The streaming client against a real gRPC server with a stub core."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import aclosing, closing
from typing import Any

import pytest

from llmserve.client import AsyncClient, Client
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


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"heat": 3}, "has no input named heat; it has: max_tokens, messages, seed, stop_words"),
        ({"seed": -1}, "seed=-1 is no UINT64"),
        ({"temperature": "hot"}, "temperature='hot' is no FP32"),
    ],
)
def test_wrong_parameters_are_refused_before_anything_is_sent(
    client: Client, core: StubCore, parameters: Any, words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        list(client.generate("x", **parameters))
    assert core.requests == []


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
