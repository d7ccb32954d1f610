"""Requests per second with 32 in flight, without and with dynamic batching."""

import asyncio
import time

import numpy as np
import tritonclient.grpc.aio as triton

IN_FLIGHT = 32
SECONDS = 2.0


async def requests_per_second(client: triton.InferenceServerClient, model: str) -> float:
    x = triton.InferInput("X", [1, 4], "FP32")
    x.set_data_from_numpy(np.array([[1, 2, 3, 4]], dtype=np.float32))
    started, num_answers = time.perf_counter(), 0

    async def ask() -> None:
        nonlocal num_answers
        while time.perf_counter() - started < SECONDS:
            result = await client.infer(model, [x])
            assert result.as_numpy("SUM").tolist() == [[10.0]]
            num_answers += 1

    await asyncio.gather(*(ask() for _ in range(IN_FLIGHT)))
    return num_answers / (time.perf_counter() - started)


async def main() -> None:
    async with triton.InferenceServerClient("localhost:8001") as client:
        one = await requests_per_second(client, "one")
        two = await requests_per_second(client, "two_batched")
    print(f"one:         {one:6.0f}/s\ntwo_batched: {two:6.0f}/s, {two / one:.1f} times as many")
    assert two > 3 * one


asyncio.run(main())
