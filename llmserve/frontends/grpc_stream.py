"""One `ModelStreamInfer` call: many requests in flight, each a task; their responses interleave on one wire.

Responses of one request stay in order because one task writes them, and a task pulls its next response only when the
transport has taken the last one: a slow client slows its own requests down, and nothing piles up. A request that fails
is answered in-band and the call goes on. When the client cancels, every task is cancelled, which closes the core's
streams.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from llmserve.errors import InternalError, LlmserveError
from llmserve.frontends.door import Core, is_decoupled
from llmserve.frontends.grpc_messages import (
    deadline_after,
    early_error_message,
    empty_final_message,
    parse_request,
    stream_message,
    wants_empty_final_response,
)

MAX_IN_FLIGHT = 1024  # requests of one call; reading pauses there, and HTTP/2 flow control holds the client back

logger = logging.getLogger(__name__)


class InferStream:
    """Answers the requests of one call."""

    def __init__(self, core: Core, context: Any) -> None:
        self._core = core
        self._context = context
        self._deadline = deadline_after(context.time_remaining())
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._write_lock = asyncio.Lock()

    async def run(self) -> None:
        """Return when the client has half-closed and all its requests are answered."""
        async with asyncio.TaskGroup() as requests:
            while True:
                await self._slots.acquire()
                message = await self._context.read()
                if message is grpc.aio.EOF:
                    return
                requests.create_task(self._answer(message))

    async def _answer(self, message: service_pb2.ModelInferRequest) -> None:
        try:
            await self._infer(message)
        except LlmserveError as error:
            await self._write(early_error_message(message.id, error))
        except Exception as error:  # border: a fault of ours must not take the other requests down
            logger.exception("a request of a stream failed")
            await self._write(early_error_message(message.id, InternalError(f"internal error: {error!r}")))
        finally:
            self._slots.release()

    async def _infer(self, message: service_pb2.ModelInferRequest) -> None:
        config = self._core.model_config(message.model_name, message.model_version)
        decoupled = is_decoupled(config)
        wants_empty_final = wants_empty_final_response(message)
        request = parse_request(message, config, deadline=self._deadline)
        async with aclosing(self._core.infer_stream(request)) as responses:
            async for response in responses:
                says_only_final = decoupled and response.final and not response.outputs and response.error is None
                if not says_only_final:
                    await self._write(stream_message(response, decoupled=decoupled))
                elif wants_empty_final:
                    await self._write(empty_final_message(response))

    async def _write(self, message: service_pb2.ModelStreamInferResponse) -> None:
        async with self._write_lock:
            try:
                await self._context.write(message)
            except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:  # the call is over: nobody waits
                raise asyncio.CancelledError from error
