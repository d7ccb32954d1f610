"""Hundreds of streams at the same time, over both protocols, against one real server process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from typing import Any

import openai
import tritonclient.grpc.aio as triton_aio

from tests.e2e.conftest import ServerProcess
from tests.e2e.test_streaming import DOCUMENTS, client_inputs, metric, wait_for_idle

MODEL = "ensemble"
NUM_STREAMS = 500  # half of them over each protocol
NUM_CHANNELS = 5
MAX_TOKENS = 24


async def over_openai(client: openai.AsyncOpenAI, document: str) -> str:
    messages: Any = [{"role": "user", "content": f"Summarize:\n{document}"}]
    stream = await client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=MAX_TOKENS, temperature=0, stream=True
    )
    pieces = [chunk.choices[0] async for chunk in stream]
    assert pieces[-1].finish_reason in ("stop", "length")
    return "".join(piece.delta.content or "" for piece in pieces)


async def over_grpc(client: triton_aio.InferenceServerClient, document: str) -> str:
    async def asked() -> AsyncIterator[dict[str, Any]]:
        inputs = client_inputs(f"Summarize:\n{document}", max_tokens=MAX_TOKENS)
        yield {"model_name": MODEL, "inputs": inputs, "enable_empty_final_response": True}

    texts, is_final = [], False
    async for result, error in client.stream_infer(asked()):
        assert error is None
        assert not is_final
        is_final = result.get_response().parameters["triton_final_response"].bool_param
        if (output := result.as_numpy("text_output")) is not None:
            texts.append(output.reshape(-1)[0].decode())
    assert is_final
    return "".join(texts)


async def most_in_flight(server: ServerProcess, done: asyncio.Event) -> float:
    most = 0.0
    while not done.is_set():
        most = max(most, await asyncio.to_thread(metric, server, "nv_trt_llm_request_metrics", 'request_type="active"'))
        await asyncio.sleep(0.1)
    return most


async def test_500_streams_say_what_each_says_alone(server: ServerProcess) -> None:
    async with AsyncExitStack() as clients:
        made = openai.AsyncOpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0, timeout=120)
        http = await clients.enter_async_context(made)
        channels = [
            await clients.enter_async_context(triton_aio.InferenceServerClient(server.grpc))
            for _ in range(NUM_CHANNELS)
        ]

        def ask(number: int) -> Awaitable[str]:
            document = DOCUMENTS[number // 2 % len(DOCUMENTS)]
            if number % 2:
                return over_openai(http, document)
            return over_grpc(channels[number // 2 % NUM_CHANNELS], document)

        alone = [await ask(number) for number in range(2 * len(DOCUMENTS))]
        assert len(set(alone)) > len(DOCUMENTS)
        done = asyncio.Event()
        watching = asyncio.create_task(most_in_flight(server, done))
        together = await asyncio.gather(*(ask(number) for number in range(NUM_STREAMS)))
        done.set()
        most = await watching
    assert together == [alone[number % len(alone)] for number in range(NUM_STREAMS)]
    assert most > NUM_STREAMS / 5  # at once in the engine, as far as somebody looked
    await asyncio.to_thread(wait_for_idle, server)
