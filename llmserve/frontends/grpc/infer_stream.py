"""One `ModelStreamInfer` call: many requests in flight, one task each; their responses interleave on one stream.

Responses of one request stay in order because one task writes them. A task pulls its next response when the transport
has taken the previous one, so a slow client only slows its own requests and nothing accumulates. A failed request is
answered in-band and the call continues. With the metadata `triton_grpc_error: true`, a model's error ends the call as
its status instead; an error before any model runs is still answered in-band. The call's deadline always ends it. When
the call ends, every task is cancelled, which closes the core's streams.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc
from tritonclient.grpc import service_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import DeadlineExceeded, InternalError, InvalidArgument, LlmserveError
from llmserve.frontends.grpc.admission import header_of
from llmserve.frontends.grpc.error_status import status_of
from llmserve.frontends.grpc.infer_messages import (
    deadline_after,
    parse_request,
    wants_empty_final_response,
)
from llmserve.frontends.grpc.response_messages import (
    early_error_message,
    empty_final_message,
    large_cost,
    large_stream_message,
    stream_message,
)
from llmserve.frontends.shared.data_source import DataSource
from llmserve.frontends.shared.delivery import Delivery, deliver
from llmserve.frontends.shared.extension_state import Extensions
from llmserve.frontends.shared.forwarded_headers import accompanied
from llmserve.frontends.shared.raw_tensors import num_bytes
from llmserve.frontends.shared.request_context import enter_part
from llmserve.frontends.shared.restrictions import Api
from llmserve.frontends.shared.server_core import Core, is_decoupled
from llmserve.serving.instruments.trace import Trace
from llmserve.serving.types import InferResponse
from llmserve.wire.event_loop import INLINE_BYTES
from llmserve.wire.http2.call import Received
from llmserve.wire.http2.messages import LargeMessage
from llmserve.wire.http2.sender import CallClosed

MAX_IN_FLIGHT = 1024  # requests of one call; then reading pauses, and HTTP/2 flow control stops the client
ERROR_STATUS = ("triton_grpc_error", "true")  # metadata

logger = logging.getLogger(__name__)


class _CallFailed(Exception):
    """The call ends with the status of `error`."""

    def __init__(self, error: LlmserveError) -> None:
        self.error = error


class InferStream:
    """Answers the requests of one call."""

    def __init__(self, core: Core, extensions: Extensions, context: Any) -> None:
        self._core = core
        self._extensions = extensions
        self._context = context
        self._headers = extensions.grpc_headers.chosen(context.invocation_metadata)
        self._header = header_of(context.invocation_metadata())
        self._deadline = deadline_after(context.time_remaining())
        self._errors_end_it = ERROR_STATUS in context.invocation_metadata()
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._write_lock = asyncio.Lock()

    async def run(self) -> None:
        """Returns when the client has half-closed and all its requests are answered."""
        if self._extensions.grpc_compression:
            self._context.compress(self._extensions.grpc_compression)
        failed: LlmserveError | None = None
        try:
            await self._answer_all()
        except* _CallFailed as failures:
            failed = next(failure.error for failure in failures.exceptions if isinstance(failure, _CallFailed))
        if failed is not None:
            await self._context.abort(status_of(failed), str(failed))
        time_left = self._context.time_remaining()
        if time_left is not None and time_left <= 0:  # engines may end requests at the deadline with ordinary answers
            await self._context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    async def _answer_all(self) -> None:
        async with asyncio.TaskGroup() as requests:
            while True:
                await self._slots.acquire()
                received = await self._context.read()
                if received is None:
                    return
                task = requests.create_task(self._answer(received))
                task.add_done_callback(partial(_release, received))  # a task that is cancelled at once never runs

    async def _answer(self, received: Received) -> None:
        message = received.message
        try:
            await self._infer(received)
        except DeadlineExceeded as error:  # all requests have the deadline of the call
            raise _CallFailed(error) from error
        except LlmserveError as error:
            await self._write(early_error_message(message.id, error))
        except _CallFailed:
            raise
        except Exception as error:  # border: an internal error must not fail the other requests
            logger.exception("a request of a stream failed")
            await self._write(early_error_message(message.id, InternalError(f"internal error: {error!r}")))
        finally:
            self._slots.release()

    async def _infer(self, received: Received) -> None:
        message = received.message
        enter_part(message.model_name)
        trace = self._extensions.tracer.sample(message.model_name)
        if trace is None:
            return await self._respond(received, None)
        trace.stamp("GRPC_WAITREAD_START")  # the message has been read
        trace.stamp("GRPC_WAITREAD_END")
        try:
            return await self._respond(received, trace)
        finally:
            self._extensions.tracer.finish(message.model_name, trace)

    async def _respond(self, received: Received, trace: Trace | None) -> None:
        message, share = received.message, received.share
        keys = self._extensions.api_keys
        if keys is not None and (lack := keys.lack(Api.INFERENCE, self._header)):  # withdrawn after the call began
            raise InvalidArgument(lack.value)
        config = self._core.model_config(message.model_name, message.model_version)
        decoupled = is_decoupled(config)
        wants_empty_final = wants_empty_final_response(message)
        memory = self._extensions.memory
        request, delivery = await self._context.beside_loop(
            lambda: parse_request(message, config, DataSource(memory, share), deadline=self._deadline),
            share,
            size=share.num_bytes,
        )
        request = accompanied(request, trace, self._headers, self._extensions.tenant(self._header))
        async with aclosing(self._core.infer_stream(request)) as responses:
            async for response in responses:
                if self._errors_end_it and response.error is not None:
                    raise _CallFailed(response.error)
                says_only_final = decoupled and response.final and not response.outputs and response.error is None
                if says_only_final:
                    if wants_empty_final:
                        await self._write(empty_final_message(response), trace)
                elif num_bytes(response.outputs) <= INLINE_BYTES:  # for example a token
                    delivered = deliver(response, delivery, core=self._core, memory=memory, config=config)
                    message = stream_message(delivered, decoupled=decoupled, elsewhere=delivery.places)
                    await self._write(message, trace)
                else:
                    make = partial(self._large_message, response, delivery, config)
                    message = await self._context.beside_loop(make, share, size=large_cost(response, delivery))
                    await self._write(message, trace)

    def _large_message(self, response: InferResponse, delivery: Delivery, config: ModelConfig) -> LargeMessage:
        delivered = deliver(response, delivery, core=self._core, memory=self._extensions.memory, config=config)
        return large_stream_message(delivered, decoupled=is_decoupled(config), elsewhere=delivery.places)

    async def _write(
        self, message: service_pb2.ModelStreamInferResponse | LargeMessage, trace: Trace | None = None
    ) -> None:
        async with self._write_lock:
            if trace is not None:
                trace.stamp("GRPC_SEND_START")
            try:
                await self._context.write(message)
            except CallClosed as error:  # the client no longer waits
                raise asyncio.CancelledError from error
            if trace is not None:
                trace.stamp("GRPC_SEND_END")


def _release(received: Received, task: asyncio.Task[None]) -> None:
    received.share.release()
