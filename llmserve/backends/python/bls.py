"""Business logic scripting: how a model calls other models, from its own thread.

A `ServerApi` carries a call: to the core's loop in this process (`local_server.py`), or through a channel to the server
(`process/`).
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeAlias

from llmserve.backends.python.errors import TritonModelException
from llmserve.backends.python.responses import InferenceResponse
from llmserve.errors import LlmserveError, Unsupported
from llmserve.serving.types import InferRequest, InferResponse

CLOSED = "other models can only be called from execute, not while the model is initialized"

Receive: TypeAlias = Callable[[InferResponse | None], None]
Cancel: TypeAlias = Callable[[], object]


class ServerApi(Protocol):
    """The server's services for models; usable from any thread."""

    def call(self, request: InferRequest, receive: Receive, *, only_first: bool = False) -> Cancel:
        """Start a request to another model. Its responses go to `receive`, except an empty final one; then None.

        `receive` is called on a thread that must not be blocked. `only_first`: only the first response is used,
        whatever it contains.
        """
        ...

    def ask(self, method: str, *arguments: Any) -> Any:
        """Use one of the server's services (`services.py`), and wait for the result. Raises `LlmserveError`."""
        ...


class NoServer:
    """For contexts without a server: while a config is completed, and in code that belongs to no model."""

    def call(self, request: InferRequest, receive: Receive, *, only_first: bool = False) -> Cancel:
        raise TritonModelException(CLOSED)

    def ask(self, method: str, *arguments: Any) -> Any:
        raise TritonModelException("the server cannot be called from here")


def ask(server: ServerApi, method: str, *arguments: Any) -> Any:
    """`server.ask`, with errors as models expect them."""
    try:
        return server.ask(method, *arguments)
    except LlmserveError as error:
        raise TritonModelException(str(error)) from error


def call_single(server: ServerApi, request: InferRequest) -> tuple[Future[InferenceResponse], Cancel]:
    """The response of a model that is not decoupled, with errors as error responses; and a function that cancels it."""
    answer: Future[InferenceResponse] = Future()
    answer.set_running_or_notify_cancel()  # a task that stops waiting must not cancel the future while it is being set

    def receive(response: InferResponse | None) -> None:
        if answer.done():
            return
        if response is None or not response.final:
            response = failed_response(
                request,
                Unsupported(
                    f"Model {request.model_name} is using the decoupled. The current BLS request call doesn't support "
                    "models using the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' "
                    "or 'async_exec' calls for decoupled models."
                ),
            )
        answer.set_result(InferenceResponse.received(response))

    return answer, server.call(request, receive, only_first=True)


def failed_response(request: InferRequest, error: LlmserveError) -> InferResponse:
    return InferResponse(request.model_name, request.model_version, request.request_id, error=error, final=True)


class _Mailbox:
    """Received responses, for a reader that waits in a thread or on an event loop."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._responses: deque[InferResponse | None] = deque()
        self._wake: Callable[[], object] | None = None

    def put(self, response: InferResponse | None) -> None:
        with self._arrived:
            self._responses.append(response)
            self._arrived.notify()
            wake, self._wake = self._wake, None
        if wake is not None:
            with suppress(RuntimeError):  # its loop is closed: the model stopped waiting before the response came
                wake()

    def get(self) -> InferResponse | None:
        with self._arrived:
            self._arrived.wait_for(lambda: self._responses)
            return self._responses.popleft()

    async def get_async(self) -> InferResponse | None:
        await self.arrived_async()
        return self._responses.popleft()

    async def arrived_async(self) -> None:
        """Wait until there is something to get."""
        loop = asyncio.get_running_loop()
        while True:
            with self._arrived:
                if self._responses:
                    return
                arrived = asyncio.Event()
                self._wake = partial(loop.call_soon_threadsafe, arrived.set)
            await arrived.wait()


class ResponseIterator:
    """The responses of a request; then an empty one, unless the last one is marked as final. Leaving it cancels it."""

    def __init__(self, server: ServerApi, request: InferRequest) -> None:
        self._mailbox = _Mailbox()  # all that the server knows, so that this object ends when the model drops it
        self._is_over = False
        self.stop = server.call(request, self._mailbox.put)  # has no reference to this object

    def __iter__(self) -> ResponseIterator:
        return self

    def __next__(self) -> InferenceResponse:
        if self._is_over:
            raise StopIteration
        return self._converted(self._mailbox.get())

    def __aiter__(self) -> ResponseIterator:
        return self

    async def __anext__(self) -> InferenceResponse:
        if self._is_over:
            raise StopAsyncIteration
        return self._converted(await self._mailbox.get_async())

    async def begun(self) -> ResponseIterator:
        """Returns itself when the first response is there: until then, a model's loop continues."""
        await self._mailbox.arrived_async()
        return self

    def cancel(self) -> None:
        self.stop()

    def __del__(self) -> None:
        if hasattr(self, "stop") and not self._is_over:
            self.stop()

    def _converted(self, response: InferResponse | None) -> InferenceResponse:
        if response is None:
            self._is_over = True
            return InferenceResponse()
        self._is_over = response.final
        return InferenceResponse.received(response)
