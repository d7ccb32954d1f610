"""The gRPC front end: `inference.GRPCInferenceService` and `grpc.health.v1.Health` over `http2`.

    ModelInfer        unary; refused for decoupled models
    ModelStreamInfer  see `infer_stream`
    everything else   a look-up in the core

If a client cancels, disconnects or reaches its deadline, the handler's task is cancelled. This closes its core stream.
"""

# ruff: noqa: N802  # method names are the protocol's

from __future__ import annotations

import ssl
from functools import partial
from typing import Any

from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2

from llmserve.errors import Unsupported
from llmserve.frontends.grpc.admission import header_of, restricted
from llmserve.frontends.grpc.error_status import answers_errors
from llmserve.frontends.grpc.extension_rpcs import ExtensionRpcs
from llmserve.frontends.grpc.health import health_methods
from llmserve.frontends.grpc.infer_messages import deadline_after, parse_request
from llmserve.frontends.grpc.infer_stream import InferStream
from llmserve.frontends.grpc.known_calls import known
from llmserve.frontends.grpc.large_messages import parse_large
from llmserve.frontends.grpc.response_messages import infer_message, large_cost, large_infer_message
from llmserve.frontends.shared.data_source import DataSource
from llmserve.frontends.shared.delivery import deliver
from llmserve.frontends.shared.extension_state import Extensions
from llmserve.frontends.shared.forwarded_headers import accompanied
from llmserve.frontends.shared.raw_tensors import num_bytes
from llmserve.frontends.shared.request_context import name_model
from llmserve.frontends.shared.server_core import Core, is_decoupled, single_response
from llmserve.serving.instruments.trace import Trace
from llmserve.wire.event_loop import INLINE_BYTES
from llmserve.wire.http2.call import Call
from llmserve.wire.http2.connection import NO_LIMITS
from llmserve.wire.http2.keepalive import ConnectionLimits
from llmserve.wire.http2.messages import MAX_MESSAGE_BYTES, LargeMessage
from llmserve.wire.http2.method import Method
from llmserve.wire.http2.server import Http2Server, serve


class InferenceService(ExtensionRpcs):
    """The whole service."""

    async def ServerLive(self, request: Any, context: Any) -> service_pb2.ServerLiveResponse:
        return service_pb2.ServerLiveResponse(live=self._core.live())

    async def ServerReady(self, request: Any, context: Any) -> service_pb2.ServerReadyResponse:
        return service_pb2.ServerReadyResponse(ready=self._core.ready())

    async def ServerMetadata(self, request: Any, context: Any) -> service_pb2.ServerMetadataResponse:
        core = self._core
        return service_pb2.ServerMetadataResponse(name=core.name, version=core.version, extensions=core.extensions)

    async def ModelReady(self, request: Any, context: Any) -> service_pb2.ModelReadyResponse:
        return service_pb2.ModelReadyResponse(ready=self._core.model_ready(request.name, request.version))

    async def ModelMetadata(self, request: Any, context: Any) -> service_pb2.ModelMetadataResponse:
        return self._core.model_metadata(request.name, request.version)

    async def ModelConfig(self, request: Any, context: Any) -> service_pb2.ModelConfigResponse:
        config = self._core.model_config(request.name, request.version)
        return service_pb2.ModelConfigResponse(config=config)

    async def ModelStatistics(self, request: Any, context: Any) -> service_pb2.ModelStatisticsResponse:
        statistics = self._core.statistics(request.name, request.version)
        return service_pb2.ModelStatisticsResponse(model_stats=statistics)

    async def ModelInfer(self, request: Any, context: Any) -> service_pb2.ModelInferResponse | LargeMessage:
        name_model(request.model_name)
        trace = self._extensions.tracer.sample(request.model_name)
        if trace is not None:
            self._follow(trace, request.model_name, context)
        config = self._core.model_config(request.model_name, request.model_version)
        if is_decoupled(config):
            raise Unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")
        memory = self._extensions.memory
        deadline = deadline_after(context.time_remaining())
        source = DataSource(memory, context.share)
        parsed, delivery = await context.beside_loop(
            lambda: parse_request(request, config, source, deadline=deadline),
            context.share,
            size=context.share.num_bytes,
        )
        headers = self._extensions.grpc_headers.chosen(context.invocation_metadata)
        tenant = self._extensions.tenant(header_of(context.invocation_metadata()))
        parsed = accompanied(parsed, trace, headers, tenant)
        response = await single_response(self._core, parsed)
        if response.error is not None:
            raise response.error

        delivered = partial(deliver, response, delivery, core=self._core, memory=memory, config=config)
        message: service_pb2.ModelInferResponse | LargeMessage
        if num_bytes(response.outputs) <= INLINE_BYTES:
            message = infer_message(delivered(), elsewhere=delivery.places)
        else:
            message = await context.beside_loop(
                lambda: large_infer_message(delivered(), elsewhere=delivery.places),
                context.share,
                size=large_cost(response, delivery),
            )
        if self._extensions.grpc_compression:
            context.compress(self._extensions.grpc_compression)
        if trace is not None:
            trace.stamp("GRPC_SEND_START")
        return message

    async def stream(self, context: Call) -> None:
        """`ModelStreamInfer`."""
        await InferStream(self._core, self._extensions, context).run()

    def _follow(self, trace: Trace, model: str, context: Any) -> None:
        """Traces a unary call to its end. The message is already read when the handler starts."""

        def end(context: Any) -> None:
            trace.stamp("GRPC_SEND_END")
            self._extensions.tracer.finish(model, trace)

        trace.stamp("GRPC_WAITREAD_START")
        trace.stamp("GRPC_WAITREAD_END")
        context.add_done_callback(end)


def methods_of(service: InferenceService) -> dict[str, Method]:
    """Every RPC in the protocol's description, by path."""
    description = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    return {
        f"/{description.full_name}/{rpc.name}": Method(
            service.stream if rpc.client_streaming else answers_errors(getattr(service, rpc.name)),
            GetMessageClass(rpc.input_type).FromString,
            streams=rpc.client_streaming,
            **_large_messages(rpc.name),
        )
        for rpc in description.methods
    }


def _large_messages(rpc: str) -> dict[str, Any]:
    """The settings of RPCs that accept large messages."""
    if rpc in ("ModelInfer", "ModelStreamInfer"):
        return {"parse_large": parse_large, "largest_bytes": MAX_MESSAGE_BYTES}
    return {"largest_bytes": MAX_MESSAGE_BYTES} if rpc == "RepositoryModelLoad" else {}


async def start_grpc(
    core: Core,
    host: str,
    port: int,
    *,
    extensions: Extensions | None = None,
    limits: ConnectionLimits = NO_LIMITS,
    tls: ssl.SSLContext | None = None,
    shared: bool = False,
) -> Http2Server:
    """Listen on `host:port` (0: any free port); `Unavailable` when the port is taken.

    `extensions` are shared with other front ends; `tls` encrypts connections. `shared`: other processes use the port.
    """
    extensions = extensions or Extensions()
    methods = {**methods_of(InferenceService(core, extensions)), **health_methods(core)}
    allowed = restricted(methods, extensions.grpc_restrictions, extensions.api_keys)
    return await serve(
        known(allowed, extensions), host, port, limits=limits, tls=tls, memory=extensions.requests, shared=shared
    )
