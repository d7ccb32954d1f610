"""The gRPC front end: `inference.GRPCInferenceService` and `grpc.health.v1.Health` on one `grpc.aio` server.

    ModelInfer        unary; refused for decoupled models
    ModelStreamInfer  see `grpc_stream`
    everything else   a look-up in the core

A client that cancels, goes away or runs out of its deadline cancels the handler's task, which closes the core's stream.
"""

# ruff: noqa: N802  # method names are the protocol's

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from llmserve.errors import InternalError, LlmserveError, Unsupported
from llmserve.frontends.door import Core, is_decoupled, single_response
from llmserve.frontends.grpc_health import health_handler
from llmserve.frontends.grpc_messages import deadline_after, parse_request, response_message
from llmserve.frontends.grpc_stream import InferStream
from llmserve.frontends.listener import CLOSE_TIMEOUT_S, claim_port, port_in_use, url_host

MAX_MESSAGE_BYTES = 2**31 - 1
MAX_DETAILS_BYTES = 4096  # details travel as a header, and clients refuse headers over 8 KiB
PLAIN_BYTES = frozenset(range(0x20, 0x7F)) - {ord("%")}  # the others are percent-encoded, three bytes each

Reply = TypeVar("Reply")
Handler = Callable[[Any, Any, Any], Awaitable[Reply]]
logger = logging.getLogger(__name__)


def status_of(error: LlmserveError) -> grpc.StatusCode:
    """The neutral codes are gRPC's, by name."""
    return grpc.StatusCode[error.code.value]


def details_of(error: LlmserveError) -> str:
    """The error's text, as much of it as fits into a header."""
    text = str(error).encode("utf-8", errors="replace").decode("utf-8")
    size = 0
    for position, character in enumerate(text):
        size += sum(1 if byte in PLAIN_BYTES else 3 for byte in character.encode("utf-8"))
        if size > MAX_DETAILS_BYTES:
            return text[:position]
    return text


def answers_errors(handler: Handler[Reply]) -> Handler[Reply]:
    """Turn the core's errors into the call's status."""

    @functools.wraps(handler)
    async def answered(self: Any, request: Any, context: Any) -> Reply:
        try:
            return await handler(self, request, context)
        except LlmserveError as error:
            failure = error
        except Exception as error:  # border: a fault of ours is INTERNAL to the client, a traceback in the log
            logger.exception("%s failed", handler.__name__)
            failure = InternalError(f"internal error: {error!r}")
        await context.abort(status_of(failure), details_of(failure))
        raise AssertionError("abort raises")

    return answered


class InferenceService(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # generated, untyped
    """What is not defined here answers UNIMPLEMENTED."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def ServerLive(self, request: Any, context: Any) -> service_pb2.ServerLiveResponse:
        return service_pb2.ServerLiveResponse(live=self._core.live())

    async def ServerReady(self, request: Any, context: Any) -> service_pb2.ServerReadyResponse:
        return service_pb2.ServerReadyResponse(ready=self._core.ready())

    async def ServerMetadata(self, request: Any, context: Any) -> service_pb2.ServerMetadataResponse:
        core = self._core
        return service_pb2.ServerMetadataResponse(name=core.name, version=core.version, extensions=core.extensions)

    @answers_errors
    async def ModelReady(self, request: Any, context: Any) -> service_pb2.ModelReadyResponse:
        return service_pb2.ModelReadyResponse(ready=self._core.model_ready(request.name, request.version))

    @answers_errors
    async def ModelMetadata(self, request: Any, context: Any) -> service_pb2.ModelMetadataResponse:
        return self._core.model_metadata(request.name, request.version)

    @answers_errors
    async def ModelConfig(self, request: Any, context: Any) -> service_pb2.ModelConfigResponse:
        config = self._core.model_config(request.name, request.version)
        return service_pb2.ModelConfigResponse(config=config)

    @answers_errors
    async def ModelStatistics(self, request: Any, context: Any) -> service_pb2.ModelStatisticsResponse:
        statistics = self._core.statistics(request.name, request.version)
        return service_pb2.ModelStatisticsResponse(model_stats=statistics)

    @answers_errors
    async def RepositoryIndex(self, request: Any, context: Any) -> service_pb2.RepositoryIndexResponse:
        reply = service_pb2.RepositoryIndexResponse()
        for row in self._core.repository_index():
            if row.state == "READY" or not request.ready:
                reply.models.add(name=row.name, version=row.version, state=row.state, reason=row.reason)
        return reply

    @answers_errors
    async def ModelInfer(self, request: Any, context: Any) -> service_pb2.ModelInferResponse:
        config = self._core.model_config(request.model_name, request.model_version)
        if is_decoupled(config):
            raise Unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")
        deadline = deadline_after(context.time_remaining())
        parsed = parse_request(request, config, deadline=deadline)
        return response_message(await single_response(self._core, parsed))

    async def ModelStreamInfer(self, request_iterator: Any, context: Any) -> None:
        await InferStream(self._core, context).run()


@dataclass(frozen=True, slots=True)
class GrpcServer:
    """A running gRPC front end."""

    port: int
    server: grpc.aio.Server

    async def stop(self) -> None:
        """Close the port, give running calls `CLOSE_TIMEOUT_S`, then cancel them."""
        await self.server.stop(CLOSE_TIMEOUT_S)


async def start_grpc(core: Core, host: str, port: int) -> GrpcServer:
    """Listen on `host:port` (0: any free port); `Unavailable` when the port is taken."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),  # else two servers would share one port silently
        ]
    )
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(InferenceService(core), server)
    server.add_generic_rpc_handlers((health_handler(core),))
    if port:
        claim_port(host, port, "--grpc-port").close()  # gRPC's own error does not say what is wrong
    try:
        bound = server.add_insecure_port(f"{url_host(host)}:{port}")
    except RuntimeError as error:
        raise port_in_use(host, port, "--grpc-port", str(error)) from error
    await server.start()
    return GrpcServer(bound, server)
