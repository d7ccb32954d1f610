"""Splits a request with a batch of prompts into one request each, and merges their responses into one stream.

As with TensorRT-LLM's backend, each row is a separate request in the engine. A response belongs to one row, given by
`batch_index`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

import numpy as np

from llmserve.serving.types import InferRequest, InferResponse, Tensor


def num_rows(request: InferRequest) -> int:
    ids = request.inputs.get("input_ids")
    return ids.shape[0] if ids is not None and len(ids.shape) == 2 else 1


async def responses_by_row(
    request: InferRequest, respond: Callable[[InferRequest], AsyncGenerator[InferResponse, None]]
) -> AsyncGenerator[InferResponse, None]:
    """In order of arrival; only the last one is final. An error in one row ends all of them."""
    rows = [_row(request, index) for index in range(num_rows(request))]
    async with AsyncExitStack() as open_streams:
        streams = [await open_streams.enter_async_context(aclosing(respond(row))) for row in rows]
        pulls = {_pull(stream): index for index, stream in enumerate(streams)}
        open_streams.push_async_callback(_abandon, pulls)
        while pulls:
            done, _ = await asyncio.wait(pulls, return_when=asyncio.FIRST_COMPLETED)
            for pull in sorted(done, key=pulls.__getitem__):
                index = pulls.pop(pull)
                response = pull.result()
                if response.error is not None:
                    yield replace(response, error=response.error.at(f"in row {index} of the batch"))
                    return
                if response.final:
                    await streams[index].aclose()  # otherwise it would go on in the engine after a stop word
                else:
                    pulls[_pull(streams[index])] = index
                if response.outputs or not pulls:
                    yield replace(response, outputs=_indexed(response.outputs, index), final=not pulls)


def _row(request: InferRequest, index: int) -> InferRequest:
    return request.with_inputs(
        {
            name: Tensor(tensor.name, tensor.datatype, tensor.data[index : index + 1])
            for name, tensor in request.inputs.items()
        }
    )


def _pull(stream: AsyncGenerator[InferResponse, None]) -> asyncio.Task[InferResponse]:
    async def pull() -> InferResponse:
        return await anext(stream)

    return asyncio.create_task(pull())


async def _abandon(pulls: dict[asyncio.Task[InferResponse], int]) -> None:
    """Call it before the streams are closed, because a running stream cannot be closed."""
    for pull in pulls:
        pull.cancel()
    await asyncio.gather(*pulls, return_exceptions=True)


def _indexed(outputs: Sequence[Tensor], index: int) -> tuple[Tensor, ...]:
    name = "batch_index"
    mark = Tensor(name, "INT32", np.array([[index]], np.int32))
    return tuple([mark if tensor.name == name else tensor for tensor in outputs])
