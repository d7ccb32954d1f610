"""The gRPC front end on grpcio's own asyncio server instead of `llmserve.wire.http2`, for comparison."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import grpc
from tritonclient.grpc import service_pb2

from llmserve.frontends.grpc.inference_service import InferenceService, methods_of
from llmserve.frontends.shared.extension_state import Extensions
from llmserve.frontends.shared.server_core import Core
from llmserve.wire.http2.call import Received
from llmserve.wire.http2.messages import LargeMessage
from llmserve.wire.http2.method import Method
from llmserve.wire.http2.sender import CallClosed
from llmserve.wire.request_memory import RequestMemory, Share

STOP_S = 5.0
Result = TypeVar("Result")


class GrpcioCall:
    """Our handlers' interface of a call, on top of grpcio's context."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], memory: RequestMemory) -> None:
        self._context = context
        self._memory = memory
        self.share = memory.share()

    async def beside_loop(self, work: Callable[[], Result], share: Share, *, size: int) -> Result:
        return work()

    def invocation_metadata(self) -> Any:
        return self._context.invocation_metadata()

    def time_remaining(self) -> float | None:
        left: float | None = self._context.time_remaining()
        return left

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        await self._context.abort(code, details)
        raise AssertionError("grpcio's abort raises")

    async def read(self) -> Received | None:
        message = await self._context.read()
        return None if message is grpc.aio.EOF else Received(message, self._memory.share())

    async def write(self, message: Any) -> None:
        try:
            await self._context.write(message)
        except Exception as error:  # any error of grpcio after the client has disconnected
            raise CallClosed from error


@dataclass(frozen=True, slots=True)
class GrpcioServer:
    port: int
    server: grpc.aio.Server

    async def stop(self) -> None:
        await self.server.stop(STOP_S)


async def start_grpcio(core: Core, host: str, port: int) -> GrpcioServer:
    server = grpc.aio.server()
    methods = methods_of(InferenceService(core, Extensions()))
    name = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
    memory = RequestMemory()
    handlers = {path.rpartition("/")[2]: _handler(method, memory) for path, method in methods.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    bound = server.add_insecure_port(f"{host}:{port}")
    await server.start()
    return GrpcioServer(bound, server)


def _handler(method: Method, memory: RequestMemory) -> Any:
    def serialized(message: Any) -> bytes:
        data: bytes = b"".join(message.parts) if isinstance(message, LargeMessage) else message.SerializeToString()
        return data

    async def unary(request: Any, context: Any) -> Any:
        return await method.handle(request, GrpcioCall(context, memory))

    async def stream(requests: AsyncIterator[Any], context: Any) -> None:
        await method.handle(GrpcioCall(context, memory))

    if method.streams:
        return grpc.stream_stream_rpc_method_handler(stream, method.parse, serialized)
    return grpc.unary_unary_rpc_method_handler(unary, method.parse, serialized)
