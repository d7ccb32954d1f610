"""The server API of a model in a thread of the server: calls go directly to the core's loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any, TypeAlias

from llmserve.backends.python.bls import CLOSED, Cancel, Receive, failed_response
from llmserve.backends.python.errors import TritonModelException
from llmserve.backends.python.services import Services
from llmserve.errors import Cancelled, LlmserveError
from llmserve.serving.types import InferRequest, InferResponse

ON_THE_LOOP = "a model that declares llmserve_inline_bytes cannot call other models or the server"

Infer: TypeAlias = Callable[[InferRequest], AsyncGenerator[InferResponse, None]]


class LocalServer:
    """Refuses calls until the first request comes: models must not be called while they are loaded."""

    def __init__(self, infer: Infer, services: Services) -> None:
        self._infer = infer
        self._services = services
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def call(self, request: InferRequest, receive: Receive, *, only_first: bool = False) -> Cancel:
        self._refuse_on_loop()
        if self._loop is None:
            raise TritonModelException(CLOSED)
        forwarding = _forward(self._infer, request, receive, only_first=only_first)
        return asyncio.run_coroutine_threadsafe(forwarding, self._loop).cancel

    def ask(self, method: str, *arguments: Any) -> Any:
        self._refuse_on_loop()
        return self._services.ask(method, arguments)

    def _refuse_on_loop(self) -> None:
        """Waiting for an answer on the loop would block the whole server forever."""
        with suppress(RuntimeError):  # no loop runs in this thread
            if asyncio.get_running_loop() is self._loop:
                raise TritonModelException(ON_THE_LOOP)


def _only_ends(response: InferResponse) -> bool:
    return response.final and not (response.outputs or response.parameters or response.error)


async def _forward(infer: Infer, request: InferRequest, receive: Receive, *, only_first: bool) -> None:
    try:
        async with aclosing(infer(request)) as stream:
            async for response in stream:
                if only_first or not _only_ends(response):
                    receive(response)
                if only_first:
                    return
    except LlmserveError as error:
        receive(failed_response(request, error))
    except asyncio.CancelledError:
        receive(failed_response(request, Cancelled(f"the request of model '{request.model_name}' was cancelled")))
        raise
    finally:
        receive(None)
