"""Business logic scripting: how a model's thread calls other models, through the core's door on the core's loop."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import aclosing

from llmserve.backends.python.errors import TritonModelException
from llmserve.backends.python.responses import InferenceResponse
from llmserve.errors import LlmserveError, Unsupported
from llmserve.serving.types import InferRequest, InferResponse

Infer = Callable[[InferRequest], AsyncGenerator[InferResponse, None]]


class Door:
    """Closed until the first request comes: only then the core's loop is known."""

    def __init__(self) -> None:
        self._core: tuple[Infer, asyncio.AbstractEventLoop] | None = None

    def open(self, infer: Infer, loop: asyncio.AbstractEventLoop) -> None:
        self._core = infer, loop

    def call(self, request: InferRequest) -> Future[InferResponse]:
        """The one response of a model that is not decoupled."""
        infer, loop = self._opened()
        return asyncio.run_coroutine_threadsafe(_single(infer, request), loop)

    def iterate(self, request: InferRequest) -> Iterator[InferenceResponse]:
        """The responses of any model, then an empty one. Closing the iterator cancels the request."""
        responses: queue.SimpleQueue[InferResponse | None] = queue.SimpleQueue()
        infer, loop = self._opened()
        running = asyncio.run_coroutine_threadsafe(_forward(infer, request, responses.put), loop)
        try:
            while (response := responses.get()) is not None:
                yield InferenceResponse.received(response)
            yield InferenceResponse()
        finally:
            running.cancel()

    async def iterate_async(self, request: InferRequest) -> AsyncIterator[InferenceResponse]:
        """`iterate` for a model's own event loop."""
        own_loop = asyncio.get_running_loop()
        responses: asyncio.Queue[InferResponse | None] = asyncio.Queue()

        def put(response: InferResponse | None) -> None:
            own_loop.call_soon_threadsafe(responses.put_nowait, response)

        infer, loop = self._opened()
        running = asyncio.run_coroutine_threadsafe(_forward(infer, request, put), loop)
        try:
            while (response := await responses.get()) is not None:
                yield InferenceResponse.received(response)
            yield InferenceResponse()
        finally:
            running.cancel()

    def _opened(self) -> tuple[Infer, asyncio.AbstractEventLoop]:
        if self._core is None:
            raise TritonModelException("other models can be called from execute on, not while the model is initialized")
        return self._core


async def _single(infer: Infer, request: InferRequest) -> InferResponse:
    try:
        async with aclosing(infer(request)) as stream:
            response = await anext(stream)
    except LlmserveError as error:
        return _failed(request, error)
    if response.final and (response.outputs or response.error is not None):
        return response
    return _failed(
        request,
        Unsupported(
            f"Model {request.model_name} is using the decoupled. The current BLS request call doesn't support models "
            "using the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or "
            "'async_exec' calls for decoupled models."
        ),
    )


async def _forward(infer: Infer, request: InferRequest, put: Callable[[InferResponse | None], None]) -> None:
    """Every response with something in it, then None."""
    try:
        async with aclosing(infer(request)) as stream:
            async for response in stream:
                if response.outputs or response.error is not None:
                    put(response)
    except LlmserveError as error:
        put(_failed(request, error))
    finally:
        put(None)


def _failed(request: InferRequest, error: LlmserveError) -> InferResponse:
    return InferResponse(request.model_name, request.model_version, request.request_id, error=error, final=True)
